"""Settings: three sources, one object, no unknown names."""

import argparse
from pathlib import Path

import pytest
from pydantic import ValidationError

from deft_server.commands import serve
from deft_server.commands.settings_sources import (
    GROUPS,
    add_flags,
    build_settings,
    read_environment,
    read_file,
)
from deft_server.settings import Settings, SettingsError


def parsed(*flags: str) -> dict[str, object]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return vars(parser.parse_args(flags))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "deft.toml"
    path.write_text(text)
    return path


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path):
    file = read_file(written(tmp_path, "port = 1\nmax_batch = 1\nmax_waiting = 1\n"))
    said = read_environment({"DEFT_SERVER_PORT": "2", "DEFT_SERVER_MAX_BATCH": "2", "HOME": "/"})
    settings = build_settings(parsed("--port", "3"), said.settings, file.settings)
    assert (settings.port, settings.max_batch, settings.max_waiting) == (3, 2, 1)
    assert settings.patience_ms == Settings().patience_ms


def test_every_kind_of_setting_can_be_a_flag():
    settings = build_settings(
        parsed(
            *("--host", "::1", "--default-deadline-ms", "250", "--on-hang", "reload"),
            *(
                "--no-allow-options",
                "--keys-file",
                "k.toml",
                "--cors-origins",
                "http://a, http://b",
            ),
        )
    )
    assert settings.host == "::1"
    assert settings.default_deadline_ms == 250
    assert settings.on_hang == "reload"
    assert not settings.allow_options
    assert settings.keys_file == Path("k.toml")
    assert settings.cors_origins == ("http://a", "http://b")


def test_the_help_shows_every_setting_in_one_group():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(Settings.model_fields)


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError):
        Settings().port = 1  # type: ignore[misc]


def test_an_unknown_name_is_refused_wherever_it_comes_from(tmp_path: Path):
    with pytest.raises(SettingsError, match="'prot' in the environment.*'port'"):
        read_environment({"DEFT_SERVER_PROT": "1"})
    with pytest.raises(SettingsError, match=r"'prot' in .*deft\.toml.*'port'"):
        read_file(written(tmp_path, "prot = 1\n"))
    with pytest.raises(SystemExit):
        parsed("--prot", "1")


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("port", "eight", "port: .*integer.*'eight'"),
        ("port", 70000, "port: .*65535"),
        ("max_batch", 0, "max_batch: .*1"),
        ("hang_after_s", "nan", "hang_after_s"),
        ("on_hang", "panic", "on_hang: .*'exit' or 'reload'"),
        ("tls_key", "k.pem", "both"),
        ("tls_client_ca", "ca.pem", "needs tls_certificate"),
        ("max_image_pixels", 10**9, "max_image_pixels"),
    ],
)
def test_an_unusable_value_is_named(name: str, value: object, complaint: str):
    with pytest.raises(SettingsError, match=complaint):
        build_settings({name: value})


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path):
    with pytest.raises(SettingsError, match="cannot read"):
        read_file(tmp_path / "none.toml")
    with pytest.raises(SettingsError, match="is not TOML"):
        read_file(written(tmp_path, "port = \n"))


def test_flags_of_the_policy_may_come_from_the_file_and_the_environment(tmp_path: Path):
    text = (
        'policy = "openvla"\n[policy_options]\nstatistics_key = "a"\nquick = true\nslow = false\n'
    )
    file = read_file(written(tmp_path, text))
    assert file.policy == "openvla"
    assert file.policy_flags == ("--statistics-key", "a", "--quick", "--no-slow")
    said = read_environment({"DEFT_SERVER_POLICY_OPTIONS": "--checkpoint '/my models/x'"})
    assert said.policy_flags == ("--checkpoint", "/my models/x")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--policy", "constnat"], "'constant'"),
        (["--port", "x"], "port"),
        (["--config", "/nowhere.toml"], "cannot read"),
        (["--keys-file", "/nowhere.toml"], "key file"),
        (["--tls-certificate", "/a.pem", "--tls-key", "/b.pem"], "TLS"),
        (["--host", "203.0.113.1"], "allow_anyone"),
        (["--trusted-proxies", "proxy.example"], "network"),
        (["--host", "203.0.113.1", "--allow-anyone"], "203.0.113.1:8000"),
    ],
)
def test_serve_says_what_is_wrong_in_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
):
    assert serve.main(arguments) == serve.ExitCode.BAD_SETTINGS
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_a_flag_the_policy_does_not_take_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as usage:
        serve.main(["--policy", "constant", "--checkpoint", "x"])
    assert usage.value.code == 2
    assert "--checkpoint" in capsys.readouterr().err


def test_the_earlier_name_of_a_setting_is_understood_from_every_source(tmp_path: Path):
    """`range = "peer"` is now `out_of_range = "passthrough"`; the warning says what to write."""
    said = "write out_of_range = 'passthrough'"
    for source in (
        parsed("--range", "peer"),
        read_environment({"DEFT_SERVER_RANGE": "peer"}).settings,
        read_file(written(tmp_path, 'range = "peer"\n')).settings,
    ):
        with pytest.warns(FutureWarning, match=said):
            assert build_settings(source).out_of_range == "passthrough"
    with pytest.warns(FutureWarning, match="write out_of_range = 'clamp'"):
        merged = build_settings(parsed("--range", "clamp"), {"out_of_range": "passthrough"})
    assert merged.out_of_range == "clamp"
