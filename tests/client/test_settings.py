"""What a client is set to do is checked when it is said, not when a robot waits."""

import pytest

from deft_client.settings import ClientSettings, Retries, check_url


@pytest.mark.parametrize("url", ["https://deft.example", "http://127.0.0.1:8000/", "http://a/b/"])
def test_the_url_of_a_server_loses_its_last_slash_alone(url):
    assert check_url(url) == url.rstrip("/")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://deft.example", "must start with"),
        ("deft.example:8000", "must start with"),
        ("http://", "name a host"),
        ("http://:8000", "name a host"),
        ("http://deft.example?key=1", "that of a server"),
        ("http://deft.example#top", "that of a server"),
        ("http://deft.example:0", "that of a server"),
        ("http://deft.example/v1/act", "without /v1/act: http://deft.example"),
        ("http://deft.example/v1", "without /v1: http://deft.example"),
    ],
)
def test_what_is_no_url_of_a_server_is_refused_with_what_to_do(url, said):
    with pytest.raises(ValueError, match=said):
        check_url(url)


def test_retries_may_pause_for_no_time_and_not_for_less():
    assert Retries(1, 0.0, 0.0).attempts == 1
    for wrong in ((0, 0.1, 1.0), (1, -0.1, 1.0), (1, 0.1, -1.0)):
        with pytest.raises(ValueError, match="at least one attempt"):
            Retries(*wrong)


def test_the_quality_of_a_jpeg_is_from_1_to_100():
    assert [ClientSettings(jpeg_quality=one).jpeg_quality for one in (1, 100)] == [1, 100]
    for wrong in (0, 101):
        with pytest.raises(ValueError, match="jpeg_quality must be 1 to 100"):
            ClientSettings(jpeg_quality=wrong)
