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

from gpushare.base.errors import BadUsage, GpushareError, NotFound, NotSupported
from gpushare.base.units import counted, first_few, quoted
from gpushare.host.capabilities import Capability, NodeAccess, modify_line, user_id, user_name
from gpushare.host.compute_mode import need_root
from gpushare.host.host import Host
from gpushare.mig.driver import MigReader
from gpushare.mig.ledger import NAMES, NamedInstance, changing_names, check_name, names_of, refuse_name_of_root
from gpushare.mig.places import named_instance
from gpushare.mig.plan import GpuPlan
from gpushare.mig.profile import GpuInstance
from gpushare.mig.target import need_name
from gpushare.plan import Loss, Plan, Step, deferred_step, setting_step

_CLOSED: Final = 0o400
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
        instance, compute = self.place
        part = "" if compute is None else f", compute instance {compute}"
        return f"{self.name} (GPU instance {instance}{part})"


def sudo_prefix(host: Host) -> str:
    """Return ``sudo`` for a printed command that needs root, if this user is not; a simulated host needs none."""
    return "" if host.root or host.is_simulated else "sudo "


def plan_grant(host: Host, name: str, user: str) -> Plan:
    """Return the plan that grants a named instance to one more user; only users with a grant may use it."""
    named = named_instance(host, need_name(name, f"{sudo_prefix(host)}gpushare mig grant NAME {shlex.quote(user)}"))
    granted = user_name(user_id(user))
    users = tuple(dict.fromkeys((*named.users, granted)))
    steps = access_steps(host, named, users)
    if not steps and not _nodes(host, named):
        raise _no_instance_error(named)
    return Plan(
        title=f"{name} is granted to {', '.join(users)} only",
        steps=steps,
        # With -y: it only revokes what this command granted.
        undo=f"{sudo_prefix(host)}gpushare mig revoke {shlex.quote(name)} {shlex.quote(granted)} -y",
        notes=(_RUNNING,) if steps else (f"{name} is granted to {granted} already",),
    )


def _no_instance_error(named: NamedInstance) -> NotFound:
    return NotFound(
        f"'{named.name}' means {named.profile} at slice {named.start} of {named.gpu_uuid}, and there is no such instance now",
        "see which are there: gpushare mig status",
        code="no_instance",
    )


def plan_revoke(host: Host, name: str, user: str | None = None) -> Plan:
    """Return the plan that revokes one user's grant or all of them; without grants all users may use the instance."""
    named = named_instance(host, need_name(name, f"{sudo_prefix(host)}gpushare mig revoke NAME"))
    revoked_users = named.users
    if user is not None:
        # A user removed from the machine is only known by name.
        revoked_users = tuple(granted for granted in named.users if granted in {user, user_name_or_text(user)})
        if not revoked_users:
            have = ", ".join(named.users) or "no user"
            raise NotFound(
                f"'{user[:60]}' has no grant on '{name}': it is granted to {have}",
                "see the grants: gpushare mig status",
                code="not_granted",
            )
    users = tuple(user for user in named.users if user not in revoked_users)
    steps = access_steps(host, named, users) if revoked_users else ()
    notes = [_RUNNING] if steps else [f"{name} has no grants"]
    if steps and not users:
        notes.append(f"every local user may then use {name}")
    return Plan(
        title=f"{name} is granted to {', '.join(users)} only" if users else f"{name} has no grants",
        steps=steps,
        undo="; ".join(
            f"{sudo_prefix(host)}gpushare mig grant {shlex.quote(name)} {shlex.quote(each)}" for each in revoked_users
        )
        or None,
        notes=tuple(notes),
        consent=tuple(revocation_loss(name, each, opens=not users) for each in revoked_users),
    )


def revocation_loss(name: str, user: str, *, opens: bool) -> Loss:
    """Return what the user consents to when a grant is revoked; ``opens``: it is the last one, so all users get in."""
    reasons = (f"every local user may then use '{name}'",) if opens else ()
    return Loss(action="revokes", what=f"the grant of '{name}' to {user}", why=reasons)


def access_steps(host: Host, named: NamedInstance, users: tuple[str, ...]) -> tuple[Step, ...]:
    """Return the steps after which exactly these users may use a named instance; without users all may.

    They change the record of the grants, if it differs, and the nodes. If a user no longer exists, the instance stays closed
    to all others.

    Raises:
        NotFound: a user is added, and there is no such instance now (code ``no_instance``).
        NotSupported: the driver shows no capabilities, so a grant can only be revoked.
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
    record = [] if named.users == users else [_record_step(host, named, users, needs_root=bool(added))]
    access = _node_steps(host, nodes, users)
    # A grant is recorded before its nodes are opened, a revoke after they are closed: so a crash leaves something to redo.
    return (*access, *record) if removed else (*record, *access)


def reapplied_steps(host: Host, named: NamedInstance) -> tuple[Step, ...]:
    """Return the steps that apply the grants of a name to its instance again; none without a grant or an instance.

    A new instance is open to all users: call this when it exists. Raises as `access_steps`.
    """
    return access_steps(host, named, named.users) if named.users else ()


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
            managing.append(_modprobe_step(host, node, modify=open_to_all))
        opening = []
        if present != access:
            opening.append(_access_step(host, node, present, access, users))
        # nvidia-modprobe leaves a node alone before it is changed, and manages it again only after it is as nvidia-modprobe makes it.
        steps += [*opening, *managing] if open_to_all else [*managing, *opening]
    return steps


def _access_of(users: Sequence[str], capability: Capability) -> NodeAccess:
    """Return owner, mode and list of a node that these users alone may use; without users, the driver's own."""
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


def user_name_or_text(user: str) -> str:
    """Return the name of a user given by name or id; the text itself if the user was removed from the machine."""
    uid = _user_id_or_none(user)
    return user if uid is None else user_name(uid)


def _modprobe_step(host: Host, node: _Node, *, modify: bool) -> Step:
    """Return the step that lets nvidia-modprobe manage a node (``modify``), or leave it alone: else it would undo a grant."""
    path = node.capability.path

    def command(*, modify: bool) -> str:
        return f"echo '{modify_line(modify=modify).strip()}' | sudo tee {shlex.quote(str(path))}"

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
        command=command(modify=modify),
        undo=command(modify=not modify),
        setting=path,
        read=read,
        write=write,
        wanted=modify,
        in_words=lambda value: modify_line(modify=value).strip(),
        see=f"cat {shlex.quote(path)}",
        allowed=lambda: need_root_to_grant(host),
    )


def _access_step(
    host: Host, node: _Node, present: NodeAccess | None, access_to_be: NodeAccess, users: Sequence[str]
) -> Step:
    """Return the step that gives a node its access; ``present`` None: there is no node, ``users`` are for the text."""
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
        allowed=lambda: need_root_to_grant(host),
    )


def _access_in_words(access: NodeAccess) -> str:
    """Return an access for messages: ``mode 0400 of alice``."""
    others = f" and {', '.join(map(user_name, access.users))}" if access.users else ""
    return f"mode {access.mode:04o} of {user_name(access.owner)}{others}"


def _record_step(host: Host, named: NamedInstance, users: tuple[str, ...], *, needs_root: bool) -> Step:
    """Return the step that records under a name who has a grant.

    ``needs_root``: the step refuses other users. The later steps need root, and the record alone is a grant not in force.
    """

    def write(wanted: tuple[str, ...]) -> None:
        with changing_names(host) as names:
            # Where root grants by a name that a user has given, root gets the name, too.
            names[named.name] = replace(names.get(named.name, named), users=wanted)

    path = shlex.quote(str(NAMES.path(host, "mig")))
    return setting_step(
        what=f"record under the name {named.name}: granted to {', '.join(users) or 'no user'}",
        command=f"write {path}",
        undo=f"write {path}",
        setting=f"the grant of '{named.name}'",
        read=lambda: names_of(host).get(named.name, named).users,
        write=write,
        wanted=users,
        in_words=lambda value: ", ".join(value) or "nobody",
        see=f"cat {path}",
        allowed=lambda: need_root_to_grant(host) if needs_root else None,
    )


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


def need_root_to_grant(host: Host) -> None:
    """Raise NoPermission unless this is root, who alone may change the nodes."""
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
    # The commands that take back what the undo of the layout leaves.
    undo: tuple[str, ...] = ()


def plan_names(
    host: Host,
    words: Sequence[str],
    grants: Mapping[str, Sequence[str]],
    instances: Sequence[tuple[GpuPlan, GpuInstance]],
    plans: Sequence[GpuPlan] = (),
) -> Naming:
    """Return how these instances get these names, in order, and are granted to these users only.

    A single name for several instances is numbered. ``plans`` are those of all GPUs that change (default: of the instances).

    Raises:
        BadUsage: the names are not as many as the instances, a grant is for none of them, a name means another instance, or
            an instance has another name; so has the place of one that is gone, if that name has grants.
        NotFound: there is no such user.
    """
    names = _names_for(words, len(instances))
    users = _users_by_name(names, words, grants)
    wanted = [
        NamedInstance(name=check_name(name), gpu_uuid=plan.uuid or "", profile=new.profile.name, start=new.start)
        for name, (plan, new) in zip(names, instances, strict=True)
    ]
    plans = plans or [plan for plan, _ in instances]
    index = {plan.uuid or "": plan.gpu for plan in plans}
    kept_spots = {(plan.uuid, *instance.place) for plan in plans for instance in plan.kept}
    destroyed_spots = {(plan.uuid, *gone.instance.place) for plan in plans for gone in plan.destroyed if gone.whole}
    names_now = names_of(host)
    name_at = {named.spot: named for named in names_now.values()}
    bound = [named for named in wanted if name_at.get(named.spot) != names_now.get(named.name, named)]
    for named in bound:
        other_name = name_at.get(named.spot)
        if other_name is not None and (named.spot in kept_spots or other_name.users):
            raise name_taken_error(host, other_name).restated(
                hint=f"forget it: {_forgetting_commands([other_name])[0]}"
            )
        if named.name in names_now:
            _refuse_meaning(host, names_now[named.name], index, kept_spots, destroyed_spots)
    staying = [named for named in bound if named.spot in kept_spots]
    # New names are bound before their instances exist, so that a crash loses none. Those of instances that are destroyed are
    # bound after the layout: its undo leaves them alone.
    early = [
        named
        for named in bound
        if named not in staying and names_now.get(named.name, named).spot not in destroyed_spots
    ]
    late = [named for named in bound if named not in early]
    # The names of instances that are gone give way.
    stale = [name_at[named.spot] for named in bound if named.spot in name_at and name_at[named.spot].name not in names]
    first = [replace(binding_step(host, (), stale, index), undo=None)] if stale else []
    if early:
        first.append(binding_step(host, early, (), index, to_come=names))
    after = [binding_step(host, late, (), index)] if late else []
    # Revoked before the names are forgotten: without its name nothing could open the nodes of an instance again.
    undo = [f"gpushare mig revoke {named.name} -y" for named in staying if users[named.name]]
    undo += [f"gpushare mig name --forget {named.name} -y" for named in staying]
    for named in wanted:
        granted = users[named.name]
        is_unchanged = named not in bound and named.spot in kept_spots
        in_force = is_unchanged and not any(plan_grant(host, named.name, user).steps for user in granted)
        if granted and not in_force:
            after.append(grant_step(host, named.name, granted))
        if is_unchanged:
            new_users = [user for user in granted if user not in names_now[named.name].users]
            undo += [f"gpushare mig revoke {named.name} {shlex.quote(user)} -y" for user in new_users]
    return Naming(
        bound=tuple(bound),
        first=tuple(first),
        commands=tuple(binding_commands(early, index)),
        after=tuple(after),
        undo=tuple(undo),
    )


def _refuse_meaning(
    host: Host, named: NamedInstance, index: Collection[str], kept: Collection[object], destroyed: Collection[object]
) -> None:
    """Raise BadUsage if a name cannot get another instance: its own is on another GPU, stays, or is gone and has grants."""
    refuse_name_elsewhere(host, named, index)
    if named.spot in kept or (named.users and named.spot not in destroyed):
        raise name_taken_error(host, named)


def _users_by_name(
    names: Sequence[str], words: Sequence[str], grants: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Return for each name the users who get a grant. ``names`` are the ``words`` of the user, numbered if it was one for all.

    A grant for a name before it was numbered is for all of its instances.

    Raises:
        BadUsage: a grant is for none of the names.
        NotFound: there is no such user.
    """
    for key in grants:
        if key not in {*names, *words}:
            hint = f"names: {first_few(names, 16)}"
            raise BadUsage(f"--grant {quoted(key)} names none of the instances", hint, code="no_name")
    for user in (user for users in grants.values() for user in users):
        user_id(user)
    # If one word was numbered, its grants are for every number. A user may be given twice, by name and by number.
    for_all = [] if [*names] == [*words] else words
    return {
        name: list(dict.fromkeys(user_name_or_text(user) for key in (name, *for_all) for user in grants.get(key, ())))
        for name in names
    }


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


def grant_commands(name: str, users: Sequence[str]) -> list[str]:
    return [f"gpushare mig grant {name} {shlex.quote(user)}" for user in users]


def revoke_step(host: Host, named: NamedInstance) -> Step:
    """Return the step that revokes all grants of a name, planned when it acts."""
    return deferred_step(
        f"revoke the grants of '{named.name}' ({named})",
        f"gpushare mig revoke {named.name}",
        lambda: plan_revoke(host, named.name).steps,
        undo="\n".join(grant_commands(named.name, named.users)),
    )


def grant_step(host: Host, name: str, users: Sequence[str], *, again: bool = False) -> Step:
    """Return the step that grants a name to users, or, ``again``, applies its grants to an instance that was made again.

    It is planned when it acts: the nodes exist only when the instance does.
    """

    def make() -> Sequence[Step]:
        """Return the steps that add the users to those who have a grant by then."""
        named = named_instance(host, name)
        return access_steps(host, named, tuple(dict.fromkeys((*named.users, *map(user_name_or_text, users)))))

    return deferred_step(
        f"grant '{name}' to {', '.join(users)}" + (" again" if again else ""),
        "\n".join(grant_commands(name, users)),
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
    gpus = (f"GPU {gpu.index}" for gpu in host.nvml.identities() if gpu.uuid == named.gpu_uuid)
    where = next(gpus, named.gpu_uuid)
    return BadUsage(
        f"the name '{named.name}' belongs to {named} of {where}",
        f"choose another, or forget it: gpushare mig name --forget {named.name}",
        code="name_taken",
    )


class _NamesWork:
    """Binds and forgets names; the undo leaves alone names that were changed since."""

    def __init__(self, host: Host, bind: Sequence[NamedInstance], forget: Sequence[NamedInstance]) -> None:
        self._host = host
        self._bind = {named.name: named for named in bind}
        self._forget = {named.name: named for named in forget if named.name not in self._bind}
        # What the changed names meant before; None: nothing.
        self._before: dict[str, NamedInstance | None] = {}

    def do(self) -> None:
        with changing_names(self._host) as names:
            for name, forgotten in self._forget.items():
                refuse_name_of_root(self._host, name)
                present = names.get(name)
                if present is not None and present.gpu_uuid == forgotten.gpu_uuid:
                    self._before[name] = names.pop(name)
            for name, named in self._bind.items():
                self._before[name] = names.get(name)
                names[name] = named

    def undo(self) -> None:
        with changing_names(self._host) as names:
            for name, earlier in self._before.items():
                if names.get(name) != self._bind.get(name):
                    continue
                if earlier is None:
                    del names[name]
                else:
                    names[name] = earlier


def binding_step(
    host: Host,
    bind: Sequence[NamedInstance],
    forget: Sequence[NamedInstance] = (),
    index: Mapping[str, int] | None = None,
    *,
    to_come: Collection[str] = (),
) -> Step:
    """Return the step that binds names to instances and forgets others; undone, the names mean what they did.

    ``index`` are the indexes of GPUs by UUID, as far as they are known.

    The instances of names ``to_come`` do not exist yet. The step puts these into the record; no command can do that, so
    `plan_change` shows ``mig name`` where the instances exist.
    """
    indexes = index or {}
    where = {uuid: f" on GPU {number}" for uuid, number in indexes.items()}
    words = [f"name {named}{where.get(named.gpu_uuid, '')} '{named.name}'" for named in bind]
    words += [f"forget the name '{named.name}' ({named})" for named in forget]
    writing = [f"write {shlex.quote(str(NAMES.path(host, 'mig')))}"] if to_come else []
    binding = [named for named in bind if named.name not in to_come]
    # An instance has one name, and a name one instance: what they have now is forgotten first.
    rebound = [named for named in binding if named.name in names_of(host)]
    work = _NamesWork(host, bind, forget)
    return Step(
        what=", ".join(words),
        command="\n".join([*writing, *_forgetting_commands([*forget, *rebound]), *binding_commands(binding, indexes)]),
        undo="\n".join([*_forgetting_commands(bind), *binding_commands(forget, indexes)]),
        do=work.do,
        revert=work.undo,
    )


def binding_commands(bind: Sequence[NamedInstance], indexes: Mapping[str, int]) -> list[str]:
    """Return the commands that give existing instances their names; ``indexes`` as in `binding_step`."""
    options = {uuid: f" -g {number}" for uuid, number in indexes.items()}
    return [f"gpushare mig name {named.name} {named}{options.get(named.gpu_uuid, '')}" for named in bind]


def _forgetting_commands(forget: Sequence[NamedInstance]) -> list[str]:
    return [f"gpushare mig name --forget {named.name}" for named in forget]


def name_upkeep_steps(host: Host, plans: Sequence[GpuPlan], changed: Collection[str]) -> list[Step]:
    """Return the steps that forget names whose instance a change destroys for good, and grant again where it is created.

    Names that a `Naming` has ``changed`` are left to that. A name outlives its instance: a reboot, for example.
    """
    steps = []
    for plan in plans:
        destroyed = {removed.instance.place for removed in plan.destroyed if removed.whole}
        created = {new.instance.place for new in plan.created}
        for named in names_of(host).values():
            if named.name in changed or named.gpu_uuid != plan.uuid:
                continue
            if named.place in created and named.users:
                steps.append(grant_step(host, named.name, named.users, again=True))
            elif named.place in destroyed - created:
                steps.append(binding_step(host, (), [named], {named.gpu_uuid: plan.gpu}))
    return steps


def reapply_grants(host: Host, gpu_uuid: str) -> list[str]:
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
