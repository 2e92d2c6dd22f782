"""``require``: all plans of a job, before its first step, or one error. Run side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dsa_planner import envelope, operators, streams
from dsa_planner.errors import DsaPlannerError, RequirementError, UnsupportedError, shown

if TYPE_CHECKING:
    import torch

    from dsa_planner.plan import Plan

__all__ = ["require"]

_REMEDY = "run 'dsa-plan precompile' for what is missing, and give all ranks the same layers"
Answer = tuple[str, str]
"""What a rank has to say of a config: the digest of the plan's file, or "" and what is wrong."""


def require(
    configs: Iterable[Mapping[str, Any]],
    *,
    device: int | str | torch.device | None = None,
    group: Any = None,
) -> list[Plan]:
    """Load every plan that a job will need, or fail before its first step.

    Each plan is found in the layers, checked against its digest, and loaded on the device with all its kernels. With
    DSA_PLAN_COMPILE=missing, what no layer has is compiled first.

    With a process group, the ranks compare what they loaded, file by file: two builds of one plan may round
    differently. All ranks then succeed, or all fail with the same message. Every rank of the group must call this, with
    the same configs in the same order.

    Args:
        configs: for each plan a mapping with ``topk``, and where they differ from the defaults of ``load_plan`` also
            ``backend``, ``heads``, ``head_dim``, ``d_weights`` and ``deterministic``; or ``PlanConfig`` objects. An
            ``arch`` is checked to be one that the device runs.
        device: as for ``load_plan``; None for torch's current one.
        group: a process group of torch.distributed, for example ``torch.distributed.group.WORLD``, which is None
            before ``init_process_group``; None to compare with nobody.

    Returns:
        the plans, in the order of the configs.

    Raises:
        RequirementError: a plan is missing, damaged, outside the support envelope, does not load here, or is another
            file on another rank; it lists all problems of all ranks, which are those of the group. Or the ranks
            could not compare.
    """
    requests: list[str] = []
    found: list[Plan | None] = []
    answers: list[Answer] = []
    # Nothing may leave this loop as an error: the other ranks would wait for this one.
    listed, fault = _listed(configs)
    for config in listed:
        plan, answer = _look(config, device)
        requests.append(_described(config))
        found.append(plan)
        answers.append(answer)
    if fault:
        requests.append("configs")
        answers.append(("", fault))
    everyone: list[tuple[list[str], list[Answer]]] = [(requests, answers)]
    if group is not None:
        everyone = _gathered((requests, answers), group)
    problems = _problems(everyone, group is not None)
    if problems:
        ranks = "" if group is None else f" on {len(everyone)} ranks"
        raise RequirementError(f"{len(everyone[0][0])} required plans{ranks}", tuple(problems), _REMEDY)
    return [plan for plan in found if plan is not None]


def _listed(configs: Any) -> tuple[list[Any], str]:
    """The configs, and why there are no more of them."""
    if isinstance(configs, Mapping) or _is_config(configs) or not hasattr(configs, "__iter__"):
        return [configs], ""
    listed: list[Any] = []
    try:
        for config in configs:
            listed.append(config)  # what came before a fault is kept
    except Exception as error:  # whatever the caller's iterator raises
        return listed, f"they could not be listed ({_said(error)})"
    return listed, ""


def _is_config(config: Any) -> bool:
    """Whether it is an object like ``PlanConfig``."""
    return hasattr(config, "model_dump") and not isinstance(config, type)


def _said(error: Exception) -> str:
    try:
        return " ".join(f"{type(error).__name__}: {error}".split())[:500]
    except Exception:
        return type(error).__name__


def _look(config: Any, device: Any) -> tuple[Plan | None, Answer]:
    """A plan, loaded; and the digest of its file, or what is wrong."""
    try:
        request = _request(config)
        arch = request.pop("arch", None)
        ordinal = streams.ordinal_of("cuda" if device is None else device)
        plan = operators.load_plan(**request, device=ordinal).prepare()
        if arch is not None and arch != plan.config["arch"]:
            raise UnsupportedError(
                f"arch={shown(arch)}", f"the plan for cuda:{ordinal} is of {plan.config['arch']}", "leave arch out"
            )
        return plan, (plan.file_sha256, "")
    except DsaPlannerError as error:
        return None, ("", str(error))
    except Exception as error:  # nothing may keep the other ranks waiting
        return None, ("", _said(error))


def _request(config: Any) -> dict[str, Any]:
    """The keyword arguments of ``load_plan`` for a config, and its arch if it has one."""
    given = config.model_dump() if _is_config(config) else config
    if not isinstance(given, Mapping):
        raise UnsupportedError(
            f"required plan {shown(config)}", "it is no mapping of config fields", 'give for example {"topk": 1024}'
        )
    request = dict(given)
    for name in request:
        if name not in envelope.PLAN_FIELDS:
            raise envelope.refusal("field", name, "a plan config has no such field", envelope.PLAN_FIELDS)
    if "topk" not in request:
        raise UnsupportedError(f"required plan {shown(config)}", "topk has no default", "give topk")
    operator = request.pop("operator", envelope.DEFAULTS["operator"])
    if operator != envelope.DEFAULTS["operator"]:
        raise UnsupportedError(f"operator={shown(operator)}", "it is not an operator", "leave it out")
    return request


def _described(config: Any) -> str:
    """A config for a message, the same on every rank."""
    try:
        given = config.model_dump() if _is_config(config) else config
        if not isinstance(given, Mapping):
            return shown(given)
        words = {str(name): value if isinstance(value, str) else shown(value) for name, value in given.items()}
        return " ".join(f"{name}={words[name]}" for name in sorted(words)) or "{}"
    except Exception as error:  # whatever the caller's object raises
        return f"<{type(config).__name__} that cannot be described: {type(error).__name__}>"


def _gathered(mine: tuple[list[str], list[Answer]], group: Any) -> list[Any]:
    from torch import distributed

    asked = f"{len(mine[0])} required plans"
    try:
        if distributed.get_rank(group) < 0:
            raise RequirementError(
                asked, ("this process is not in the group",), "call require only on the ranks of the group"
            )
        everyone: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(everyone, mine, group=group)
    except RequirementError:
        raise
    except Exception as error:  # a rank that is gone, a group that is none
        problem = f"the ranks could not compare ({_said(error)})"
        raise RequirementError(asked, (problem,), "look for a rank that failed, and check the group") from error
    return everyone


def _problems(everyone: Sequence[tuple[Sequence[str], Sequence[Answer]]], several: bool) -> list[str]:
    """What is wrong, in an order that is the same on every rank; what several ranks say, once."""
    said: dict[str, list[int]] = {}
    first = everyone[0][0]
    for rank, (requests, answers) in enumerate(everyone):
        if requests != first:
            said.setdefault("it asks for other plans than rank 0", []).append(rank)
        for request, (_, problem) in zip(requests, answers, strict=True):
            if problem:
                said.setdefault(f"{request}: {problem}", []).append(rank)
    problems = [f"{_ranks(ranks)}: {text}" if several else text for text, ranks in said.items()]
    if all(requests == first for requests, _ in everyone):
        for number, request in enumerate(first):
            files: dict[str, list[int]] = {}
            for rank, (_, answers) in enumerate(everyone):
                if answers[number][0]:
                    files.setdefault(answers[number][0], []).append(rank)
            if len(files) > 1:
                differing = ", ".join(f"{_ranks(ranks)} {digest[:12]}" for digest, ranks in files.items())
                problems.append(f"{request}: ranks have different files ({differing})")
    return problems


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, runs of them as first to last: "rank 3", "ranks 0-5, 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join("-".join(map(str, run)) for run in runs)
