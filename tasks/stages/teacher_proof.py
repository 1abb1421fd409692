"""Before the first token: teachers whose settings do not say enough are loaded once, in a process of their own."""

from __future__ import annotations

import os
from typing import Any

from infra import launch
from schemas.errors import StageError, error_from_json
from schemas.typed_json import encode
from schemas.work.teach import ProofWork, TeacherToProve
from tasks.runs.session import Session
from tasks.stages.teach import teacher_source
from tasks.teachers import kinds


def prove_teachers(session: Session) -> None:
    """Once a session, in order of teacher_index. Raises the error of the first teacher that cannot teach.

    Nothing is started when no teacher's kind asks for it.
    """
    config = session.config
    teachers = [config.teacher(i) for i in range(len(config.teachers))]
    wanted = [teacher for teacher in teachers if kinds.of(teacher.kind).proved_by_loading]
    if not wanted or session.teachers_proved:
        return
    threads = config.teach.threads or os.cpu_count() or 1
    to_prove = tuple(TeacherToProve(t.id, t.kind, teacher_source(session, t)) for t in wanted)
    path = session.scratch / "work" / "teacher_proof.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(ProofWork(to_prove, threads)))

    def heard(_rank: int, _message: dict[str, Any]) -> None:
        session.moves()

    commands = launch.group_commands("tasks.ranks.teacher_proof", path, 1, {"OMP_NUM_THREADS": str(threads)})
    (process,) = launch.run_group(
        commands, log_folder=session.scratch / "logs" / "teacher_proof", on_message=heard, grace_seconds=5.0
    )  # fmt: skip
    if process.error is not None:
        raise error_from_json(process.error)
    if process.status != 0:
        raise StageError("proof of the teachers", expected="to finish", found=process.describe())
    session.teachers_proved = True
