"""Grant a named MIG instance to users, by the capability nodes of it and of its compute instances.

By default every local user may use every instance: the nodes have mode 0444. A single user becomes the owner of the
nodes (0400), several get an access control list. nvidia-modprobe would reset a node at its next use, so it is first told
to leave the nodes alone (``DeviceFileModify: 0``). All of this is lost with the instance; the grant is kept with its name.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpushare.base.errors import BadUsage, GpushareError, NoPermission, NotFound, NotSupported
from gpushare.base.units import counted, first_few, quoted
from gpushare.host.capabilities import Capability, NodeAccess, modify_line, user_id, user_name
from gpushare.host.compute_mode import need_root
from gpushare.host.host import Host
from gpushare.mig.driver import MigReader
from gpushare.mig.ledger import NAMES, NamedInstance, check_name, names_changed, names_of
from gpushare.mig.places import unknown_name_error
from gpushare.mig.plan import GpuPlan
from gpushare.mig.profile import GpuInstance
from gpushare.mig.shape import InstanceShape
from gpushare.mig.target import need_name
from gpushare.plan import Loss, Plan, Step, deferred_step, setting_step

_CLOSED: Final = 0o400
_STILL_OPEN: Final = (
    "/dev/nvidiaN, nvidiactl and nvidia-uvm stay open to all users: CUDA needs them, and they open no instance"
)
_RUNNING: Final = "programs already in the instance stay in it"


@dataclass(frozen=True)
class _Node:
    """One node of a named instance; ``place`` has the ids of the GPU instance, and of a compute instance or None."""

    name: str
    minor: int
    place: tuple[int, int | None]
    capability: Capability

    @property
    def title(self) -> str:
        """Return the instance in words."""
        instance, compute = self.place
        part = "" if compute is None else f", compute instance {compute}"
        return f"{self.name} (GPU instance {instance}{part})"


def as_root(host: Host) -> str:
    """Return what stands before a command that needs root. sudo would drop GPUSHARE_HOST, but a simulated host needs none."""
    return "" if host.root or host.is_simulated else "sudo "


def plan_grant(host: Host, name: str, user: str) -> Plan:
    """Return the plan that grants a named instance to one more user; only users with a grant may use it."""
    named = _named_instance(host, need_name(name, f"{as_root(host)}gpushare mig grant NAME {shlex.quote(user)}"))
    granted = user_name(user_id(user))
    users = tuple(dict.fromkeys((*named.users, granted)))
    steps = access_steps(host, named, users)
    if not steps and not _nodes(host, named):
        raise _no_instance_error(named)
    return Plan(
        title=f"{name} is granted to {', '.join(users)} only",
        steps=steps,
        # With -y: it only revokes what this command granted.
        undo=f"{as_root(host)}gpushare mig revoke {shlex.quote(name)} {shlex.quote(granted)} -y",
        notes=(_RUNNING, _STILL_OPEN) if steps else (f"{name} is granted to {granted} already",),
    )


def _no_instance_error(named: NamedInstance) -> NotFound:
    """Return the error about a name whose instance is not there."""
    return NotFound(
        f"'{named.name}' means {named.profile} at slice {named.start} of {named.gpu_uuid}, and there is no such instance now",
        "see which are there: gpushare mig status",
        code="no_instance",
    )


def plan_revoke(host: Host, name: str, user: str | None = None) -> Plan:
    """Return the plan that revokes one user's grant or all of them; without grants all users may use the instance."""
    named = _named_instance(host, need_name(name, f"{as_root(host)}gpushare mig revoke NAME"))
    revoked_users = named.users
    if user is not None:
        # A user removed from the machine is only known by name.
        revoked_users = tuple(granted for granted in named.users if granted in {user, known_user(user)})
        if not revoked_users:
            have = ", ".join(named.users) or "no user"
            raise NotFound(
                f"'{user[:60]}' has no grant on '{name}': it is granted to {have}",
                "see the grants: gpushare mig status",
                code="not_granted",
            )
    users = tuple(user for user in named.users if user not in revoked_users)
    steps = access_steps(host, named, users) if revoked_users else ()
    notes = [_RUNNING] if steps else [f"{name} has no grants; nothing to do"]
    if steps and not users:
        notes.append(f"every local user may then use {name}")
    return Plan(
        title=f"{name} is granted to {', '.join(users)} only" if users else f"{name} has no grants",
        steps=steps,
        undo="; ".join(
            f"{as_root(host)}gpushare mig grant {shlex.quote(name)} {shlex.quote(each)}" for each in revoked_users
        )
        or None,
        notes=tuple(notes),
        consent=tuple(revocation_loss(name, each, opens=not users) for each in revoked_users),
    )


def revocation_loss(name: str, user: str, *, opens: bool) -> Loss:
    """Return what the loss of a grant means; ``opens``: it is the last one."""
    reasons = (f"every local user may then use '{name}'",) if opens else ()
    return Loss(action="revokes", what=f"the grant of '{name}' to {user}", why=reasons)


def access_steps(host: Host, named: NamedInstance, users: tuple[str, ...]) -> tuple[Step, ...]:
    """Return the steps after which exactly these users may use a named instance: its record, and its nodes.

    Without users it is open to all, as every new instance is. With the users of the record only the nodes change. If a
    user no longer exists, the instance stays closed to all others.

    Raises:
        NotFound: a user is added, and there is no such instance now (code ``no_instance``).
        NotSupported: the driver shows no capabilities; a grant can be revoked all the same.
        GpushareError: NVML does not answer.
    """
    added = set(users) - set(named.users)
    removed = set(named.users) - set(users)
    try:
        nodes = _nodes(host, named)
    except NotSupported:
        if added or not removed:
            raise
        nodes = []
    if added and not nodes:
        raise _no_instance_error(named)
    record = _record_steps(host, named, users, needs_root=bool(added))
    access = _node_steps(host, nodes, users)
    # A grant is recorded before its nodes are opened, a revoke after they are closed: so a crash leaves something to redo.
    return (*access, *record) if removed else (*record, *access)


def reapplied_steps(host: Host, named: NamedInstance) -> tuple[Step, ...]:
    """Return the steps that apply the grants of a name to its instance again; none without a grant or an instance.

    A new instance is open to all users: call this when it exists. Raises as `access_steps`.
    """
    return access_steps(host, named, named.users) if named.users else ()


def _named_instance(host: Host, name: str) -> NamedInstance:
    """Return the instance that a name means. Raises NotFound if there is no such name."""
    names = names_of(host)
    named = names.get(name)
    if named is None:
        raise unknown_name_error(name, names)
    return named


def _nodes(host: Host, named: NamedInstance) -> list[_Node]:
    """Return the nodes of a named instance, its own first; none if there is no such instance."""
    gpu = next((gpu for gpu in host.nvml.identities() if gpu.uuid == named.gpu_uuid), None)
    if gpu is None or gpu.error is not None or not gpu.mig_enabled:
        return []
    instances = MigReader(host.nvml).layout(gpu).instances
    instance = next((instance for instance in instances if instance.place == named.place), None)
    minor = host.nvml.minor_number(gpu.index)
    if instance is None or minor is None:
        return []
    capabilities = host.capabilities.of_gpu(minor)
    places = [(instance.id, None), *((instance.id, part.id) for part in instance.compute)]
    missing = [place for place in places if place not in capabilities]
    if missing:
        raise NotSupported(
            f"the driver shows no capability of {named.name} below /proc/driver/nvidia/capabilities",
            "access per instance needs nv_cap_enable_devfs=1 of the module nvidia; in a container: run it on the host",
            gpu=gpu.index,
            code="no_capabilities",
        )
    return [_Node(named.name, minor, place, capabilities[place]) for place in places]


def _node_steps(host: Host, nodes: Sequence[_Node], users: Sequence[str]) -> list[Step]:
    """Return the steps that open nodes to these users only, or to all if there are none."""
    steps: list[Step] = []
    open_to_all = not users
    for node in nodes:
        access = _access_of(users, node.capability)
        present = host.capabilities.access(node.capability)
        managing = []
        if node.capability.modify != open_to_all:
            managing.append(_modify_step(host, node, modify=open_to_all))
        opening = []
        if present != access:
            opening.append(_access_step(host, node, present, access, users))
        # nvidia-modprobe leaves a node alone before it is changed, and manages it again only after it is as nvidia-modprobe makes it.
        steps += [*opening, *managing] if open_to_all else [*managing, *opening]
    return steps


def _access_of(users: Sequence[str], capability: Capability) -> NodeAccess:
    """Return the access of a node that these users alone may use; without users, the driver's own."""
    if not users:
        return NodeAccess(mode=capability.mode)
    # A user who was removed from the machine has no id.
    ids = sorted({uid for uid in map(_user_id_or_none, users) if uid is not None})
    if len(ids) == 1:
        # One user needs no access control list, which not every file system of /dev supports.
        return NodeAccess(owner=ids[0], mode=_CLOSED)
    return NodeAccess(mode=_CLOSED, users=tuple(ids))


def _user_id_or_none(user: str) -> int | None:
    try:
        return user_id(user)
    except NotFound:
        return None


def known_user(user: str) -> str:
    """Return the name of a user, or what is left of one who was removed from the machine."""
    uid = _user_id_or_none(user)
    return user if uid is None else user_name(uid)


def _modify_step(host: Host, node: _Node, *, modify: bool) -> Step:
    """Return the step that lets nvidia-modprobe manage a node, or leave it alone."""
    path = node.capability.path

    def read() -> bool | None:
        held = host.capabilities.read(node.minor, *node.place)
        return None if held is None else held.modify

    def write(wanted: bool) -> None:  # noqa: FBT001
        if not wanted and host.capabilities.access(node.capability) is None:
            # The node does not exist yet, and with the setting off nvidia-modprobe would not create it.
            host.programs.run(["nvidia-modprobe", "-f", path])
        host.capabilities.set_modify(node.capability, modify=wanted)

    what = f"let nvidia-modprobe manage the node of {node.title}"
    if not modify:
        what = f"let nvidia-modprobe leave the node of {node.title} alone"
    return setting_step(
        what=what,
        command=_modify_command(node.capability, modify=modify),
        undo=_modify_command(node.capability, modify=not modify),
        setting=path,
        read=read,
        write=write,
        wanted=modify,
        in_words=lambda value: modify_line(modify=value).strip(),
        see=f"cat {shlex.quote(path)}",
        allowed=lambda: _need_root(host),
    )


def _access_step(
    host: Host, node: _Node, present: NodeAccess | None, access_to_be: NodeAccess, users: Sequence[str]
) -> Step:
    """Return the step that gives a node its new access."""
    earlier = present or NodeAccess(mode=node.capability.mode)
    users_text = "all users"
    if users:
        users_text = f"{(' and ' if len(users) == 2 else ', ').join(users)} only"
    return setting_step(
        what=f"open {node.title} to {users_text}",
        command=_access_commands(node.capability, earlier, access_to_be),
        undo=_access_commands(node.capability, access_to_be, earlier),
        setting=f"the access to {node.capability.node}",
        # A node that is gone needs no undo.
        read=lambda: host.capabilities.access(node.capability) or earlier,
        write=lambda access: host.capabilities.set_access(node.capability, access),
        wanted=access_to_be,
        in_words=_access_in_words,
        see=f"ls -l {shlex.quote(node.capability.node)}",
        allowed=lambda: _need_root(host),
    )


def _access_in_words(access: NodeAccess) -> str:
    others = f" and {', '.join(map(user_name, access.users))}" if access.users else ""
    return f"mode {access.mode:04o} of {user_name(access.owner)}{others}"


def _record_steps(host: Host, named: NamedInstance, users: tuple[str, ...], *, needs_root: bool) -> list[Step]:
    """Return the step that records under a name who has a grant, or none if that is recorded.

    ``needs_root``: only root does the step, because the steps after it need root. A record alone would be a grant that
    is not in force.
    """
    if named.users == users:
        return []

    def write(wanted: tuple[str, ...]) -> None:
        with names_changed(host) as names:
            # Root may grant by a name in another directory: root's own directory then has it, too.
            names[named.name] = replace(names.get(named.name, named), users=wanted)

    path = shlex.quote(str(NAMES.path(host, "mig")))
    return [
        setting_step(
            what=f"record under the name {named.name}: granted to {', '.join(users) or 'no user'}",
            command=f"write {path}",
            undo=f"write {path}",
            setting=f"the grant of '{named.name}'",
            read=lambda: names_of(host).get(named.name, named).users,
            write=write,
            wanted=users,
            in_words=lambda value: ", ".join(value) or "nobody",
            see=f"cat {path}",
            allowed=lambda: _need_root(host) if needs_root else None,
        )
    ]


def _modify_command(capability: Capability, *, modify: bool) -> str:
    return f"echo '{modify_line(modify=modify).strip()}' | sudo tee {shlex.quote(str(capability.path))}"


def _access_commands(capability: Capability, before: NodeAccess, wanted: NodeAccess) -> str:
    """Return the shell lines that turn the access of a node from ``before`` into ``wanted``."""
    node = capability.node
    # chmod would change the mask of a list that is not removed.
    lines = [f"sudo setfacl -b {node}"] if before.users else []
    lines += [f"sudo chmod {wanted.mode:04o} {node}"]
    if wanted.owner != before.owner:
        lines.append(f"sudo chown {shlex.quote(user_name(wanted.owner))}:root {node}")
    if wanted.users:
        lines.append(f"sudo setfacl {' '.join(f'-m u:{user_name(uid)}:r' for uid in wanted.users)} {node}")
    return "\n".join(lines)


def _need_root(host: Host) -> None:
    need_root(host, "changing who may use a MIG instance")


@dataclass(frozen=True)
class Naming:
    """How the instances of a layout get their names and grants."""

    # The names that are new, or get another instance.
    bound: tuple[NamedInstance, ...] = ()
    # Steps before the instances exist, and when they exist.
    first: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()
    # The commands that do the same as ``first``, once the instances exist.
    commands: tuple[str, ...] = ()
    losses: tuple[Loss, ...] = ()
    # The commands that take back what the undo of the layout leaves.
    undo: tuple[str, ...] = ()
    # All names that it binds or forgets.
    changed: frozenset[str] = frozenset()


def plan_names(
    host: Host,
    words: Sequence[str],
    grants: Mapping[str, Sequence[str]],
    instances: Sequence[tuple[GpuPlan, GpuInstance]],
    *,
    may_move: bool = True,
    plans: Sequence[GpuPlan] = (),
) -> Naming:
    """Return how these instances get these names, in order, and are granted to these users only.

    A single name for several instances is numbered. A name moves only between instances of the GPUs of the plans (default:
    those of the instances) or from a GPU that is gone; without ``may_move`` only if its instance no longer exists.

    Raises:
        BadUsage: the names are not as many as the instances, a grant is for none of them, or a name may not move.
        NotFound: there is no such user.
    """
    names = _names_for(words, len(instances))
    users = _users_by_name(names, words, grants)
    names_now = names_of(host)
    places = {
        check_name(name): NamedInstance(name=name, gpu_uuid=plan.uuid or "", profile=new.profile.name, start=new.start)
        for name, (plan, new) in zip(names, instances, strict=True)
    }
    bound = [named for name, named in places.items() if name not in names_now or names_now[name].spot != named.spot]
    plans = plans or [plan for plan, _ in instances]
    index = {plan.uuid or "": plan.gpu for plan in plans}
    kept_spots = {(plan.uuid, *instance.place) for plan in plans for instance in plan.kept}
    # Names that these instances take from others.
    taken = [names_now[named.name] for named in bound if named.name in names_now]
    for named in taken:
        refuse_name_elsewhere(host, named, index)
        if not may_move and named.spot in kept_spots:
            raise name_taken_error(host, named)
    moving = [named for named in taken if may_move and named.gpu_uuid in index]
    # Names that the instances have now, and lose.
    spots = {named.spot for named in places.values()}
    replaced = [named for named in names_now.values() if named.name not in places and named.spot in spots]
    destroyed_spots = {
        (plan.uuid, *removed.instance.place) for plan, _ in instances for removed in plan.destroyed if removed.whole
    }
    # A destroyed instance has a loss of its own, which tells its name.
    losing = [named for named in (*moving, *replaced) if named.spot not in destroyed_spots]
    steps = [revoke_step(host, named) for named in losing if named.users]
    # New names are bound before their instances exist, so that a crash loses none. The others change after the layout:
    # the undo of a layout leaves them alone.
    bound_before = [
        named for named in bound if not (may_move and named.name in names_now) and named.spot not in kept_spots
    ]
    bound_after = [named for named in bound if named not in bound_before]
    if bound_after or replaced:
        moved = [named for named in moving if named.spot in kept_spots]
        steps.append(names_step(host, bound_after, replaced, index, moved=moved))
    for name, named in places.items():
        unchanged = named not in bound and named.spot in kept_spots
        in_force = unchanged and not any(plan_grant(host, name, user).steps for user in users[name])
        if users[name] and not in_force:
            steps.append(grant_step(host, name, users[name]))
    losses = []
    staying = [named.name for named in bound if named.spot in kept_spots]
    # Without its name nothing could open the nodes of an instance again.
    undo = [f"gpushare mig revoke {name} -y" for name in staying if users[name]]
    undo += [f"gpushare mig name --forget {name} -y" for name in staying]
    undo += [
        f"gpushare mig revoke {name} {shlex.quote(user)} -y"
        for name, named in places.items()
        if named not in bound and named.spot in kept_spots | destroyed_spots
        for user in users[name]
        if user not in names_now[name].users
    ]
    for named in (*losing, *(named for named in taken if named not in moving)):
        # If its instance or GPU was gone before, a name without a grant is no loss, and cannot be restored.
        if named.spot in kept_spots or named.users:
            action = "forgets" if named in replaced else "moves"
            reasons = (f"the grants of {', '.join(named.users)} end",) if named.users else ()
            losses.append(Loss(action=action, what=f"the name '{named.name}' of {named}", why=reasons))
        if named.spot in kept_spots:
            undo += restoring_commands(named.name, named, index[named.gpu_uuid], named.users)
    return Naming(
        bound=tuple(bound),
        first=(names_step(host, bound_before, (), index, to_come=[*names]),) if bound_before else (),
        commands=tuple(binding_commands(bound_before, index)),
        after=tuple(steps),
        changed=frozenset(named.name for named in (*bound, *replaced)),
        losses=tuple(losses),
        undo=tuple(undo),
    )


def _users_by_name(
    names: Sequence[str], words: Sequence[str], grants: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Return for each name of an instance the users who get a grant; ``words`` are the names before numbering.

    Raises:
        BadUsage: a grant is for none of the names.
        NotFound: there is no such user.
    """
    # A grant for a name that was numbered is for all of its instances.
    common = [] if [*names] == [*words] else words
    # A user may be given twice, by name and by number.
    users = {
        name: list(dict.fromkeys(known_user(user) for key in (name, *common) for user in grants.get(key, ())))
        for name in names
    }
    for key in grants:
        if key not in {*names, *words}:
            hint = f"names: {first_few(names, 16)}"
            raise BadUsage(f"--grant {quoted(key)} names none of the instances", hint, code="no_name")
    for user in {user for user_names in users.values() for user in user_names}:
        user_id(user)
    return users


def _names_for(words: Sequence[str], count: int) -> list[str]:
    """Return the names of so many instances; a single name for several is numbered.

    Raises:
        BadUsage: a name is given twice, or there are not as many names as instances (code ``bad_count``).
    """
    names = [*words]
    if len(words) == 1 and count > 1:
        names = [f"{words[0]}-{number}" for number in range(1, count + 1)]
    repeated = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if repeated is not None:
        raise BadUsage(
            f"the name {quoted(repeated)} is given twice", "give each instance a name of its own", code="bad_count"
        )
    if len(names) != count:
        raise BadUsage(
            f"{counted(len(names), 'name')} for {counted(count, 'instance')}: {', '.join(map(str, names))[:200]}",
            "give as many names as instances, or one name, which becomes NAME-1, NAME-2 ...",
            code="bad_count",
        )
    return names


def restoring_commands(name: str, instance: NamedInstance | InstanceShape, gpu: int, users: Sequence[str]) -> list[str]:
    """Return the commands that give an instance on a GPU its name and its grants back."""
    return [f"gpushare mig name {name} {instance} -g {gpu}", *_grant_commands(name, users)]


def _grant_commands(name: str, users: Sequence[str]) -> list[str]:
    return [f"gpushare mig grant {name} {shlex.quote(user)}" for user in users]


def revoke_step(host: Host, named: NamedInstance) -> Step:
    """Return the step that revokes all grants of a name, planned when it acts."""
    return deferred_step(
        f"revoke the grants of '{named.name}' ({named})",
        f"gpushare mig revoke {named.name}",
        lambda: plan_revoke(host, named.name).steps,
        undo="\n".join(_grant_commands(named.name, named.users)),
    )


def grant_step(host: Host, name: str, users: Sequence[str], *, again: bool = False) -> Step:
    """Return the step that grants a name to users, or, ``again``, applies its grants to an instance that was made again.

    It is planned when it acts: the nodes exist only when the instance does.
    """

    def make() -> Sequence[Step]:
        """Return the steps that add the users to those who have a grant by then."""
        named = _named_instance(host, name)
        return access_steps(host, named, tuple(dict.fromkeys((*named.users, *map(known_user, users)))))

    return deferred_step(
        f"grant '{name}' to {', '.join(users)}" + (" again" if again else ""),
        "\n".join(f"gpushare mig grant {name} {shlex.quote(user)}" for user in users),
        make,
        undo=None if again else "\n".join(f"gpushare mig revoke {name} {shlex.quote(user)}" for user in users),
    )


def refuse_name_elsewhere(host: Host, named: NamedInstance, uuids: Collection[str]) -> None:
    """Raise BadUsage if a name belongs to a GPU of this host that is not one of these.

    The name of a GPU that is gone is free, but only if all GPUs answer: the UUID of one that does not may be unknown.
    """
    if named.gpu_uuid in uuids:
        return
    gpus = host.nvml.identities()
    if any(gpu.uuid in {None, named.gpu_uuid} or gpu.error is not None for gpu in gpus):
        raise name_taken_error(host, named)


def name_taken_error(host: Host, named: NamedInstance) -> BadUsage:
    """Return the error for a name in use."""
    gpus = (f"GPU {gpu.index}" for gpu in host.nvml.identities() if gpu.uuid == named.gpu_uuid)
    where = next(gpus, named.gpu_uuid)
    return BadUsage(
        f"the name '{named.name}' belongs to {named} of {where}",
        f"choose another, or forget it: gpushare mig name --forget {named.name}",
        code="name_taken",
    )


def names_step(
    host: Host,
    bind: Sequence[NamedInstance],
    forget: Sequence[NamedInstance] = (),
    index: Mapping[str, int] | None = None,
    *,
    to_come: Collection[str] = (),
    moved: Sequence[NamedInstance] = (),
) -> Step:
    """Return the step that binds and forgets names; its undo leaves alone names that were changed since.

    ``index`` are the indexes of GPUs by UUID, as far as they are known. The instances of names ``to_come`` do not exist
    yet: only the record has these now, and `plan_change` shows the command where they exist. ``moved`` are what some of the
    names mean before.
    """
    wanted: dict[str, NamedInstance | None] = {named.name: None for named in forget}
    wanted |= {named.name: named for named in bind}
    forgotten_on = {named.name: named.gpu_uuid for named in forget}
    before: dict[str, NamedInstance | None] = {}

    def change_names() -> None:
        with names_changed(host) as names:
            for name, instance in wanted.items():
                present = names.get(name)
                if instance is not None:
                    before[name] = present
                    names[name] = instance
                elif present is None and name in names_of(host):
                    raise NoPermission(f"the name '{name}' was given by root", "run it as root: sudo gpushare ...")
                elif present is not None and present.gpu_uuid == forgotten_on[name]:
                    before[name] = names.pop(name)

    def restore_names() -> None:
        """Bind each changed name to its instance of before, or forget it if it had none."""
        with names_changed(host) as names:
            for name, old in before.items():
                # It was changed since.
                if names.get(name) != wanted[name]:
                    continue
                if old is None:
                    names.pop(name, None)
                else:
                    names[name] = old

    indexes = index or {}
    where = {uuid: f" on GPU {number}" for uuid, number in indexes.items()}
    words = [f"name {named}{where.get(named.gpu_uuid, '')} '{named.name}'" for named in bind]
    words += [f"forget the name '{named.name}' ({named})" for named in forget]
    return Step(
        what=", ".join(words),
        command="\n".join(_commands_now(host, bind, forget, indexes, to_come)),
        undo="\n".join([*_forgetting_commands(bind), *binding_commands([*forget, *moved], indexes)]),
        do=change_names,
        revert=restore_names,
    )


def _commands_now(
    host: Host,
    bind: Sequence[NamedInstance],
    forget: Sequence[NamedInstance],
    indexes: Mapping[str, int],
    to_come: Collection[str],
) -> list[str]:
    """Return the commands that bind and forget names before a change: of those ``to_come`` only the record has them."""
    writing = [f"write {shlex.quote(str(NAMES.path(host, 'mig')))}"] if to_come else []
    binding = [named for named in bind if named.name not in to_come]
    # An instance has one name, and a name one instance: what they have now is forgotten first.
    rebound = [named for named in binding if named.name in names_of(host)]
    return [*writing, *_forgetting_commands([*forget, *rebound]), *binding_commands(binding, indexes)]


def binding_commands(bind: Sequence[NamedInstance], indexes: Mapping[str, int]) -> list[str]:
    """Return the commands that give existing instances their names; ``indexes`` as in `names_step`."""
    options = {uuid: f" -g {number}" for uuid, number in indexes.items()}
    return [f"gpushare mig name {named.name} {named}{options.get(named.gpu_uuid, '')}" for named in bind]


def _forgetting_commands(forget: Sequence[NamedInstance]) -> list[str]:
    return [f"gpushare mig name --forget {named.name}" for named in forget]


def name_steps(host: Host, plans: Sequence[GpuPlan], changed: Collection[str]) -> list[Step]:
    """Return the steps for the existing names after a change, without those that `Naming` has ``changed``.

    A name whose instance is destroyed for good is forgotten; one whose instance is created again, perhaps after a
    reboot, gets its grants again.
    """
    steps = []
    for plan in plans:
        destroyed = {removed.instance.place for removed in plan.destroyed if removed.whole}
        made = {new.instance.place for new in plan.created}
        for named in names_of(host).values():
            if named.name in changed or named.gpu_uuid != plan.uuid or named.place not in destroyed | made:
                continue
            if named.place not in made:
                steps.append(names_step(host, (), [named], {named.gpu_uuid: plan.gpu}))
            elif named.users:
                steps.append(grant_step(host, named.name, named.users, again=True))
    return steps


def regrant(host: Host, gpu_uuid: str) -> list[str]:
    """Apply the grants of the named instances of a GPU again; return what failed, in words."""
    failed = []
    for named in names_of(host).values():
        if named.gpu_uuid != gpu_uuid or not named.users:
            continue
        try:
            for step in reapplied_steps(host, named):
                step.do()
        except GpushareError as error:
            failed.append(f"the grant of '{named.name}': {error.message}")
    return failed
