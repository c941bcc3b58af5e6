"""The list of tables that can be rerun, with the minutes that they take on two cores."""

from scripts.reproduce.study import FOLDER, SUFFIX, Study, Table, distinct, load_study, study_names

# Means of the lines in docs/results, of the small policy on one thread of a two-core machine.
_FRAME_S = 0.045  # an answer: 95 rows without flags
_FLAGS_FRAME_S = 0.116  # the same of 22 rows with a small model, bfloat16 or weights of few bits
_EPISODE_S = 23.0  # an episode in closed loop, by one worker
_EPISODES = 100  # that a played row has by default
_STEPS_PER_EPISODE = 60  # an episode has more: from how many episodes frames are taken


def list_tables() -> str:
    """A line for every table: its name, what it shows, and minutes on two cores."""
    lines = [("table", "frames", "episodes", "what it shows")]
    for name in study_names():
        study = load_study(FOLDER / f"{name}{SUFFIX}")
        for table in study.table:
            frames, episodes = _minutes(study, table)
            shown = f"{study.title}: {table.title}"
            lines.append((f"{name}/{table.key}", frames, episodes, shown))
    widths = [max(len(line[place]) for line in lines) for place in range(3)]
    return "".join(f"{_line(line, widths)}\n" for line in lines) + _LEGEND


_LEGEND = f"""
frames    minutes to play the frames once in the simulator and to answer them; less with --frames N
          or --recording DATA
episodes  further minutes for rows that are played in closed loop; none with --no-episodes
-         nothing of it, or times alone: give --time N and --recording DATA
By the small policy, {1000 * _FRAME_S:.0f} ms an answer and {_EPISODE_S:.0f} s an episode.
"""


def _line(line: tuple[str, str, str, str], widths: list[int]) -> str:
    name, frames, episodes, title = line
    return f"{name:<{widths[0]}}  {frames:>{widths[1]}}  {episodes:>{widths[2]}}  {title}"


def _minutes(study: Study, table: Table) -> tuple[str, str]:
    rows = distinct(study.rows(table.key))
    seconds = sum(_FLAGS_FRAME_S if row.flags else _FRAME_S for row in rows if row.batch == 1)
    replayed_s = study.num_frames * (seconds + _EPISODE_S / _STEPS_PER_EPISODE)
    played_s = len({row.method for row in rows if row.played}) * _EPISODES * _EPISODE_S
    return _text(replayed_s), _text(played_s)


def _text(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds else "-"
