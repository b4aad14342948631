# SPDX-License-Identifier: Apache-2.0
"""Who gets the next slice of a device: levels of priority, guaranteed shares, deadlines.

Pure: times are arguments, nothing is measured or waited for here. In this order a slice goes to

1. whoever is behind its guaranteed share (of the time of slices, while it has work); beside the
   accounts that were promised one there are two of the scheduler's own: AGED of the time goes to
   whatever has waited longest, beyond AGE_S, so that nothing starves, and OTHERS of what is not
   promised to work without a deadline, so that frames do not take everything;
2. the earliest deadline among those that can be met. That is decided once for each deadline by the
   demand up to it: the work left of those that were let in before, the shares of all others, and
   one slice that cannot be interrupted. A deadline that cannot be met is no deadline, so it makes
   no other late; but where a cheap end (`rescue_s`) can be had in time, its last moment counts.
   Of several at about one time there may be time for the first alone: each is that in turn.
   What takes longer than was thought is given up before one that was met the last time is late;
3. the highest level: priorities 12-15, 8-11, 4-7, 0-3. Within a level time is shared by weight,
   1 + priority % 4, by stride scheduling (Waldspurger and Weihl 1995): what was idle starts level
   with the others and has saved up nothing.

A share is a floor, not an addition: time that its owner gets by level counts towards it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

MAX_PRIORITY = 15
A_LEVEL = 4  # priorities of a level
AGE_S = 0.05  # of waiting, from which on a task is served as one that may starve
AGED = 0.03  # share of the time for those
OTHERS = 0.1  # of what is not promised: for work without a deadline
CREDIT_S = 0.5  # so far back, times the share, more than the share counts towards it
_FADE = 0.95  # of what a frame was seen to take, from frame to frame
_HOPE = 0.98  # the same of one that did not get its time: now and then it is tried again


def level(priority: int) -> int:
    """The level of a priority; the highest goes first."""
    return min(max(priority, 0), MAX_PRIORITY) // A_LEVEL


def weight(priority: int) -> int:
    """The part within its level."""
    return 1 + min(max(priority, 0), MAX_PRIORITY) % A_LEVEL


@dataclass(frozen=True)
class Ready:
    """A task that can run now. `deadline_s`: when its present work should be done, None without;
    `rescue_s`: what a cheap end of that work takes, 0 where there is none.
    """

    key: Hashable
    deadline_s: float | None = None
    rescue_s: float = 0.0


@dataclass(eq=False)
class _Account:
    """Whose share it is: one session's tasks. `lag` is the time that it is owed."""

    share: float = 0.0
    lag: float = 0.0
    members: int = 0

    def grow(self, seconds: float) -> None:
        self.lag += self.share * seconds

    def served(self, seconds: float) -> None:
        self.lag = max(self.lag - seconds, -CREDIT_S * self.share - seconds)

    @property
    def behind_s(self) -> float:
        """For how long nothing was had of the share."""
        return self.lag / self.share if self.share else 0.0


@dataclass(eq=False)
class _Entry:
    key: Hashable
    priority: int
    account: _Account
    passed: float = 0.0
    since: float = 0.0  # waits
    idle: bool = True
    deadline: float | None = None
    let_in: bool = False  # its deadline is one that can be met, by what is known
    cheap: bool = False  # let in for its rescue alone
    rescued: bool = False  # its work was ended cheaply, or is to be
    proven: bool = False  # its last deadline was met
    rescue: float = 0.0
    leads: float = -1.0  # when its cheap end was last the first of its time
    led: float = -1.0  # the same before the present deadline
    spent: float = 0.0  # on the present deadline's work
    total: float = 0.0  # what such work was seen to take
    slice: float = 0.0  # the longest of late
    level: int = 0

    @property
    def by(self) -> float:
        """The deadline of one that has one."""
        return self.deadline or 0.0

    @property
    def work(self) -> float:
        """Seconds that its deadline still asks for, as far as it is known."""
        if self.cheap:
            return self.rescue + self.slice
        return max(abs(self.total - self.spent), self.slice)  # beyond it: as much again

    def due(self, deadline: float | None, rescue: float) -> None:
        """Takes the present deadline; a new one means that the work for the last is done."""
        self.rescue = rescue
        if deadline == self.deadline:
            return
        if self.deadline is not None and self.spent:
            self.proven = self.let_in and not self.rescued
            if self.rescued:
                self.total *= _HOPE
            else:
                self.total = max(self.spent, _FADE * self.total)
        self.deadline, self.spent, self.led = deadline, 0.0, self.leads
        self.let_in = self.cheap = self.rescued = False


@dataclass
class _Turn:
    """What the last pick was, for the slice that follows it."""

    entry: _Entry
    accounts: list[_Account] = field(default_factory=list)  # that had work
    fair: bool = False  # it counts as its part of the level
    aged: bool = False  # it was the longest wait that chose


class Scheduler:
    """See the module. Keys are hashable and compared by equality."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}
        self._accounts: dict[Hashable, _Account] = {}
        self._aged, self._others = _Account(AGED), _Account(OTHERS)
        self._clock = [0.0] * (level(MAX_PRIORITY) + 1)  # of each level: where it stands
        self._led = 0.0  # the last deadline whose cheap end was the first of its time
        self._block = 0.0  # the longest slice of late: nothing interrupts it
        self._turn: _Turn | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def add(
        self, key: Hashable, priority: int, share: float = 0.0, account: Hashable = None
    ) -> None:
        """Takes a task in. `share`: 0..1 of the time, guaranteed to all tasks of its `account`
        (None: its own) together; the last one's word counts.
        """
        name = ("own", key) if account is None else ("of", account)
        found = self._accounts.setdefault(name, _Account())
        found.members += 1
        found.share = min(max(share, 0.0), 1.0)
        self._entries[key] = _Entry(key, priority, found, level=level(priority))

    def remove(self, key: Hashable) -> None:
        """Takes a task out; one that is not there is no error."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        entry.account.members -= 1
        if not entry.account.members:
            self._accounts = {n: a for n, a in self._accounts.items() if a is not entry.account}

    def pick(self, ready: Iterable[Ready], now: float) -> Hashable | None:
        """The key that gets the next slice, None when none is ready; `now` in seconds."""
        there = self._wake(ready, now)
        if not there:
            self._turn = None
            return None
        shared = [a for a in self._accounts.values() if a.share]
        accounts = _claiming(shared, [e.account for e in there])
        promised = sum(account.share for account in accounts)
        self._others.share = OTHERS * max(0.0, 1.0 - promised)
        urgent = self._urgent(there, accounts, now)
        plain = [e for e in there if e not in urgent]
        old = max(plain, key=lambda e: now - e.since, default=None)
        starving = old if old is not None and now - old.since > AGE_S else None
        claims = [self._aged] if starving is not None else []
        claims += [self._others] if plain and urgent else []
        accounts += _claiming((self._aged, self._others), claims)
        turn = self._chosen(there, urgent, plain, starving, accounts)
        entry = turn.entry
        if entry.cheap and entry in urgent:
            entry.rescued = True
            if abs(entry.by - self._led) >= entry.rescue:
                self._led, entry.leads = entry.by, now
        if turn.fair:
            least = min(e.passed for e in there if e.level == entry.level)
            self._clock[entry.level] = max(self._clock[entry.level], least)
        turn.accounts = accounts
        self._turn = turn
        return entry.key

    def _chosen(
        self,
        there: list[_Entry],
        urgent: list[_Entry],
        plain: list[_Entry],
        starving: _Entry | None,
        accounts: list[_Account],
    ) -> _Turn:
        """By the order of the module: shares, deadlines, levels."""
        if behind := [a for a in accounts if a.lag > 0]:
            account = max(behind, key=lambda a: a.behind_s)
            if account is self._aged and starving is not None:
                return _Turn(starving, fair=True, aged=True)
            if account is self._others:
                return _Turn(self._fairest(plain), fair=True)
            return _Turn(self._of(account, there), fair=True)
        if urgent:
            return _Turn(urgent[0])
        return _Turn(self._fairest(plain or there), fair=True)

    def charge(self, keys: Sequence[Hashable], seconds: float, now: float, pieces: int = 1) -> None:
        """A slice took `seconds` and ended `now`. The first key is the one that was picked, the
        others are those whom the slice served too: each is charged an equal part of it. `pieces`:
        after each of so many it could have been ended.
        """
        seconds = max(seconds, 0.0)
        turn, self._turn = self._turn, None
        self._block = max(seconds / max(1, pieces), 0.98 * self._block)
        for account in turn.accounts if turn else ():
            account.grow(seconds)
        if turn is not None and turn.aged:
            self._aged.served(seconds)
        if turn is not None and turn.fair:
            self._others.served(seconds)
        served = [e for key in keys if (e := self._entries.get(key)) is not None]
        for entry in served:
            part = seconds / len(served)
            entry.account.served(part)
            entry.since = now
            entry.spent += part
            entry.slice = max(part, _FADE * entry.slice)
            if turn is None or turn.fair:
                entry.passed += part / weight(entry.priority)

    def _wake(self, ready: Iterable[Ready], now: float) -> list[_Entry]:
        """The entries that are ready; those that were not start level, and wait from now on."""
        there: list[_Entry] = []
        for one in ready:
            entry = self._entries.get(one.key)
            if entry is None:
                continue
            entry.due(one.deadline_s, one.rescue_s)
            if entry.idle:
                entry.idle = False
                entry.since = now
                entry.passed = max(entry.passed, self._clock[entry.level])
            there.append(entry)
        if len(there) != len(self._entries):
            awake = {id(entry) for entry in there}
            for entry in self._entries.values():
                entry.idle = id(entry) not in awake
        return there

    def _urgent(self, there: list[_Entry], accounts: list[_Account], now: float) -> list[_Entry]:
        """Those whose deadline can be met and whose time it is, the earliest first."""
        dated = sorted((e for e in there if e.deadline is not None), key=lambda e: e.by)
        for entry in dated:
            if entry.let_in and now + entry.work > entry.by:
                if not entry.cheap:  # it was hoped for too long
                    entry.total, entry.rescued = max(entry.total, 1.5 * entry.spent), True
                entry.let_in = entry.cheap = entry.cheap and now <= entry.by
        self._spare(dated, accounts, now)
        for entry in sorted(dated, key=lambda e: (-e.level, e.by)):
            if not entry.let_in:
                self._let_in(entry, dated, accounts, now)
        urgent: list[_Entry] = []
        for together in self._together([e for e in dated if e.let_in]):
            # A cheap end is no matter before its last moment.
            if any(not e.cheap or now + e.work + self._block >= e.by for e in together):
                urgent += together
        return urgent

    def _together(self, dated: list[_Entry]) -> list[list[_Entry]]:
        """What goes one by one; cheap ends of about one time go together, in turn."""
        out: list[list[_Entry]] = []
        for entry in dated:
            first = out[-1][0] if out else None
            cheap = first is not None and first.cheap and entry.cheap
            if first is not None and cheap and entry.by - first.by < entry.rescue:
                out[-1].append(entry)
            else:
                out.append([entry])
        return [sorted(together, key=lambda e: e.led) for together in out]

    def _spare(self, dated: list[_Entry], accounts: list[_Account], now: float) -> None:
        """Gives up what is tried and takes longer than was thought, before what was met is late."""
        inside = [e for e in dated if e.let_in]
        tried = [e for e in inside if not (e.proven or e.cheap) and e.spent > e.total]
        for last in [e for e in inside if e.proven] if tried else ():
            if not self._met(last, inside, accounts, now):
                for entry in [e for e in tried if e.by <= last.by]:
                    entry.let_in, entry.rescued = False, True
                    entry.total = max(entry.total, 1.5 * entry.spent)
                    inside.remove(entry)
                    tried.remove(entry)

    def _let_in(
        self, entry: _Entry, dated: list[_Entry], accounts: list[_Account], now: float
    ) -> None:
        """Lets one in whose deadline can be met, or its cheap end be had in time, without making
        another late that was let in before.
        """
        entry.let_in, entry.cheap = True, False
        if self._fits(entry, dated, accounts, now):
            return
        if entry.proven:  # what was met before goes before what is tried
            tried = [e for e in dated if e.let_in and not (e.proven or e.cheap or e is entry)]
            for other in tried:
                other.let_in = False
            if self._fits(entry, dated, accounts, now):
                for other in tried:
                    other.rescued = True
                return
            for other in tried:
                other.let_in = True
        entry.cheap = entry.rescue > 0
        if not (entry.cheap and self._fits(entry, dated, accounts, now)):
            entry.let_in = entry.cheap = False

    def _fits(self, new: _Entry, dated: list[_Entry], accounts: list[_Account], now: float) -> bool:
        """With the new one let in, is every deadline met that it could make late, and its own?"""
        inside = [e for e in dated if e.let_in]
        return all(self._met(e, inside, accounts, now) for e in inside if e.by >= new.by)

    def _met(
        self, last: _Entry, inside: list[_Entry], accounts: list[_Account], now: float
    ) -> bool:
        """Does the work up to the deadline of `last` fit in the time that is left?"""
        left = last.by - now
        # Nothing is in the way of a cheap end that is the first thing to do.
        first = last.cheap and last is inside[0]
        demand = (0.0 if first else self._block) + left * (AGED + self._others.share)
        counted: set[int] = set()
        for entry in inside:
            if entry.by > last.by:
                continue
            account = entry.account
            if entry is last or not account.share or id(account) in counted:
                demand += entry.work
            else:
                demand += max(entry.work, account.share * left + account.lag)
            counted.add(id(account))
        for account in accounts:
            if id(account) not in counted:
                demand += max(0.0, account.share * left + account.lag)
        return demand <= left

    @staticmethod
    def _fairest(entries: list[_Entry]) -> _Entry:
        top = max(entry.level for entry in entries)
        return min((e for e in entries if e.level == top), key=lambda e: e.passed)

    def _of(self, account: _Account, there: list[_Entry]) -> _Entry:
        """Of an account's tasks the one whose turn it is."""
        own = [entry for entry in there if entry.account is account]
        dated = [entry for entry in own if entry.let_in]
        return min(dated, key=lambda e: e.by) if dated else self._fairest(own)


def _claiming(known: Iterable[_Account], busy: Sequence[_Account]) -> list[_Account]:
    """Those that are busy; what the others did not ask for they are not owed."""
    out = []
    for account in known:
        if account in busy:
            out.append(account)
        else:
            account.lag = min(account.lag, 0.0)
    return out
