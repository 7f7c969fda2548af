"""The pipeline of `conv_wgmma_patch.py`: patches of an image in shared memory, of which every tap reads its own part.

    works               teams of warpgroups, 64 filters to each: sums[filter, slot]
    asks for patches    a line of channels of the pixels a tile reaches, zeros beyond borders   first thread behind
    asks for filters    a stage is one tap of a line of channels of all filters of a team       first of the last 32

A patch has a 128-byte line a pixel (64 channels, 32 of float32), row after row, `line` pixels each. The slots of a tile
are the lines of a patch from the first on, seen from the first tap; a tap (r, s) sees the same lines (r * dilation *
line + s * dilation) later, so that its factor is the same tile with a later beginning: a line's chunks are swizzled by
its address. The slots at the end of each row that meet the next row's pixels are multiplied in vain and not stored.

Every team has a tile, and patches, of its own. The filter passes through a ring of stages, or is *held*, where a line's
channels are all: its stages stay, and a tile's products follow each other without a wait. Then teams take turns at the
matrix units: each starts its products when the team before has started all of its own, and stores while others
multiply (unordered teams took 17.0 instead of 16.4 us for 32x64x56x56 on an H200). Source: own.
"""

from __future__ import annotations

from typing import NamedTuple

from nbdnn.kernels.cuda.wgmma_pipeline import BOX_BYTES, LINE_BYTES, WARP

GROUP = 128  # threads of a warpgroup
ROWS = 64  # filters of a warpgroup
ASKERS = 2 * WARP
_BARRIER_BYTES = 8
_ALIGN_BYTES = 1024
_STEPS = LINE_BYTES // 32  # instructions for a line


class PatchTile(NamedTuple):
    """What a kernel is compiled for.

    slots: of a tile, at most 256, a multiple of 8. team: warpgroups that share a tile; teams: of a block. depth:
    patches of a team. stages: of the filter; all of it where it is held. chunk: slots that are stored at once.
    """

    slots: int
    team: int
    teams: int
    depth: int
    stages: int
    held: bool
    chunk: int
    min_blocks: int

    @property
    def warpgroups(self) -> int:
        return self.team * self.teams

    @property
    def workers(self) -> int:
        return GROUP * self.warpgroups

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.slots // 2

    @property
    def stage_bytes(self) -> int:
        return self.team * BOX_BYTES

    @property
    def slot_bytes(self) -> int:
        """From a slot's sums to the next's: four words more than 64, so that 8 rows of 4 slots meet all banks."""
        return 4 * (ROWS + 4)

    @property
    def staged_bytes(self) -> int:
        """Of a warpgroup: two chunks, so that one is written while the other is read."""
        return 2 * self.chunk * self.slot_bytes

    @property
    def places_at(self) -> int:
        """Where each warpgroup's table of its slots' places in the output begins."""
        return self.stages * self.stage_bytes + self.warpgroups * self.staged_bytes

    @property
    def barriers_at(self) -> int:
        return self.places_at + self.warpgroups * 4 * self.slots

    @property
    def turns_at(self) -> int:
        """Where the barriers of the teams' turns begin, behind those of stages and patches."""
        return self.barriers_at + 2 * _BARRIER_BYTES * (self.stages + self.teams * self.depth)

    @property
    def patches_at(self) -> int:
        end = self.turns_at + _BARRIER_BYTES * self.teams
        return -(-end // _ALIGN_BYTES) * _ALIGN_BYTES

    def patch_bytes(self, lines: int) -> int:
        """From a patch of so many lines to the next."""
        return -(-lines * LINE_BYTES // _ALIGN_BYTES) * _ALIGN_BYTES

    def shared_bytes(self, lines: int, reach: int) -> int:
        """Patches have so many lines, and the last tap's last slot sees the line before `reach`."""
        last = self.patches_at + (self.teams * self.depth - 1) * self.patch_bytes(lines)
        return last + max(lines, reach) * LINE_BYTES


def set_barriers(tile: PatchTile):
    """Device function (shared, thread): the barriers of a block, to be called before all its threads meet."""
    from nbdnn.kernels.cuda import ptx, ptx_tma

    integer, word = ptx.INTEGER[32], ptx.WORD
    stages, patches, arrivals = tile.stages, tile.teams * tile.depth, 4 * tile.team
    barriers_at, workers, warps = tile.barriers_at, tile.workers, tile.workers // WARP
    turns_at, teams = tile.turns_at, tile.teams

    @ptx.inline
    def initialise(shared, thread):
        if thread == workers:
            first = integer(shared + barriers_at)
            for stage in range(stages):
                ptx_tma.initialise(word(first + stage * _BARRIER_BYTES), integer(1))
                ptx_tma.initialise(word(first + (stages + stage) * _BARRIER_BYTES), integer(warps))
            first = integer(first + 2 * stages * _BARRIER_BYTES)
            for patch in range(patches):
                ptx_tma.initialise(word(first + patch * _BARRIER_BYTES), integer(1))
                ptx_tma.initialise(word(first + (patches + patch) * _BARRIER_BYTES), integer(arrivals))
            for team in range(teams):
                ptx_tma.initialise(word(shared + turns_at + team * _BARRIER_BYTES), integer(arrivals))
            ptx_tma.publish_barriers()

    return initialise


def ask_filters(tile: PatchTile, copy_stage):
    """Device function (shared, tile number, f, given): asks for the filter, once for every tile unless it is held.

    copy_stage: device function (address, barrier, block of channels, tap, given).
    """
    from nbdnn.kernels.cuda import ptx, ptx_tma

    integer, word = ptx.INTEGER[32], ptx.WORD
    held, stage_bytes = tile.held, tile.stage_bytes
    barriers_at, free_bytes, teams = tile.barriers_at, tile.stages * _BARRIER_BYTES, tile.teams

    @ptx.inline
    def ask(shared, number, f, given):
        first = word(shared + barriers_at)
        at, barrier, end, turn = shared, first, word(first + free_bytes), integer(1)
        taps = integer(f.taps_h * f.taps_w)
        while number < f.tiles:
            block = integer(0)
            while block < f.blocks_in:
                tap = integer(0)
                while tap < taps:
                    if not held:
                        ptx_tma.wait(word(barrier + free_bytes), turn)
                    ptx_tma.expect_bytes(barrier, integer(stage_bytes))
                    copy_stage(at, barrier, block, tap, given)
                    tap = integer(tap + 1)
                    at, barrier = word(at + stage_bytes), word(barrier + _BARRIER_BYTES)
                    if barrier == end:
                        at, barrier, turn = shared, first, integer(turn ^ 1)
                block = integer(block + 1)
            number = f.tiles if held else integer(number + f.blocks * teams)

    return ask


def ask_patches(tile: PatchTile, copy_patch):
    """Device function (shared, tile number, f, given): asks for the patches of all teams, from their first tile on.

    copy_patch: device function (address, barrier, tile number, block of channels, given).
    """
    from nbdnn.kernels.cuda import ptx, ptx_tma

    integer, word = ptx.INTEGER[32], ptx.WORD
    patches_at, depth, teams = tile.patches_at, tile.depth, tile.teams
    first_at, free_bytes = tile.barriers_at + 2 * tile.stages * _BARRIER_BYTES, teams * depth * _BARRIER_BYTES

    @ptx.inline
    def ask(shared, number, f, given):
        of_team, turn = integer(0), integer(1)
        while number < f.tiles:
            block = integer(0)
            while block < f.blocks_in:
                team, own = integer(0), number
                while team < teams and own < f.tiles:
                    patch = integer(team * depth + of_team)
                    barrier = word(shared + first_at + patch * _BARRIER_BYTES)
                    ptx_tma.wait(word(barrier + free_bytes), turn)
                    ptx_tma.expect_bytes(barrier, f.box_bytes)
                    copy_patch(word(shared + patches_at + patch * f.patch_bytes), barrier, own, block, given)
                    team, own = integer(team + 1), integer(own + f.blocks)
                block, of_team = integer(block + 1), integer(of_team + 1)
                if of_team == depth:
                    of_team, turn = integer(0), integer(turn ^ 1)
            number = integer(number + f.blocks * teams)

    return ask


def work(tile: PatchTile, dtype: str, a_turned: bool, set_places, store_sums):
    """Device function (shared, thread, tile number, f, given): the tiles of the thread's team.

    set_places: device function (shared, thread, warpgroup, tile number, f); store_sums: device function (sums, shared,
    thread, warpgroup, f, given).
    """
    from nbdnn.kernels.cuda import ptx, ptx_matrix, ptx_tma, ptx_wgmma

    integer, word = ptx.INTEGER[32], ptx.WORD
    held, turns_at = tile.held, tile.turns_at
    stage_bytes, patches_at = tile.stage_bytes, tile.patches_at
    depth, teams, in_team = tile.depth, tile.teams, tile.team
    barriers_at, free_bytes = tile.barriers_at, tile.stages * _BARRIER_BYTES
    patches_first, patch_free_bytes = barriers_at + 2 * free_bytes, teams * depth * _BARRIER_BYTES
    describe, no_sums = ptx_wgmma.descriptor(), ptx_matrix.zeros(tile.sums)
    multiply = ptx_wgmma.multiply("tf32" if dtype == "f32" else dtype, tile.slots, _STEPS, a_turned, False)

    @ptx.inline
    def multiply_patch(sums, patch, at, barrier, turn, shared, member, lane, f):
        """Starts the products of all taps of a line of channels. Also the next stage: its address, barrier and phase;
        and the barrier of the last one, to be told that it is free, or 0."""
        first, before = word(shared + barriers_at), word(0)
        end = word(first + free_bytes)
        row, r = patch, integer(0)
        while r < f.taps_h:
            line, s = row, integer(0)
            while s < f.taps_w:
                ptx_tma.wait(barrier, turn)
                a, b = describe(word(at + member * BOX_BYTES)), describe(line)
                ptx_wgmma.fence()
                sums = multiply(sums, a, b)
                ptx_wgmma.commit()
                if not held:
                    ptx_wgmma.wait_for_all_but_last()
                    if lane == 0 and before != 0:
                        ptx_tma.arrive(before)
                    before = word(barrier + free_bytes)
                line, s = word(line + f.tap_bytes_w), integer(s + 1)
                at, barrier = word(at + stage_bytes), word(barrier + _BARRIER_BYTES)
                if barrier == end:
                    at, barrier = shared, first
                    turn = turn if held else integer(turn ^ 1)
            row, r = word(row + f.tap_bytes_h), integer(r + 1)
        return sums, at, barrier, turn, before

    @ptx.inline
    def next_team(shared, team, lane):
        """Lets the next one multiply."""
        following = integer(team + 1)
        if following == teams:
            following = integer(0)
        if lane == 0:
            ptx_tma.arrive(word(shared + turns_at + following * _BARRIER_BYTES))

    @ptx.inline
    def run(shared, thread, number, f, given):
        lane = integer(thread & (WARP - 1))
        warpgroup, _ = ptx.divided(thread, integer(GROUP))
        team, member = ptx.divided(warpgroup, integer(in_team))
        at, barrier, turn = shared, word(shared + barriers_at), integer(0)
        of_team, patch_turn = integer(0), integer(0)
        own_turn = integer(1 if team == 0 else 0)
        number = integer(number + team * f.blocks)
        while number < f.tiles:
            set_places(shared, thread, warpgroup, number, f)
            sums, block = no_sums(), integer(0)
            while block < f.blocks_in:
                place = integer(team * depth + of_team)
                whole = word(shared + patches_first + place * _BARRIER_BYTES)
                patch = word(shared + patches_at + place * f.patch_bytes)
                ptx_tma.wait(whole, patch_turn)
                if held:
                    ptx_tma.wait(word(shared + turns_at + team * _BARRIER_BYTES), own_turn)
                    own_turn = integer(own_turn ^ 1)
                sums, at, barrier, turn, before = multiply_patch(
                    sums, patch, at, barrier, turn, shared, member, lane, f
                )
                if held:
                    next_team(shared, team, lane)
                ptx_wgmma.wait()
                if lane == 0 and before != 0:
                    ptx_tma.arrive(before)
                if lane == 0:
                    ptx_tma.arrive(word(whole + patch_free_bytes))
                block, of_team = integer(block + 1), integer(of_team + 1)
                if of_team == depth:
                    of_team, patch_turn = integer(0), integer(patch_turn ^ 1)
            store_sums(sums, shared, thread, warpgroup, member, f, given)
            number = integer(number + f.blocks * teams)

    return run
