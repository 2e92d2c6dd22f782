/* Within a warp: shuffles, votes, elect. Between warps: named barriers and mbarriers. */

/* --- warp --------------------------------------------------------------------------------------------------------- */

enum { SHFL_IDX, SHFL_UP, SHFL_DOWN, SHFL_BFLY };

/* d0 = the value of the source lane, d1 (predicate) = whether that lane is in range; s1 the lane operand, s2 the clamp
   and segment mask. */
static void op_SHFL(Warp *w, const Insn *i, u32 mask) {
  u32 a[32], inside = 0;
  u32 *d = slot(w, i->d0);
  const u32 *b = slot(w, i->s1), *c = slot(w, i->s2);
  memcpy(a, slot(w, i->s0), sizeof a);
  u32 r[32];
  LANES {
    u32 segment = c[l] >> 8 & 31, clamp = c[l] & 31, n = b[l] & 31;
    i32 highest = (l & segment) | (clamp & ~segment), lowest = l & segment, j = 0, ok = 0;
    switch (i->mod) {
      case SHFL_UP: j = l - (i32)n, ok = j >= highest; break;
      case SHFL_DOWN: j = l + n, ok = j <= highest; break;
      case SHFL_BFLY: j = l ^ n, ok = j <= highest; break;
      case SHFL_IDX: j = lowest | (n & ~segment), ok = j <= highest; break;
    }
    if (!ok) j = l;
    if ((mask >> l & 1) && !(mask >> j & 1))
      find(w->cta->machine, FIND_CONVERGENCE, -1, w->pc, w->cta, w->index, l, SPACE_LANES, 1u << (j & 31));
    r[l] = a[j & 31];
    inside |= (u32)ok << l;
  }
  WRITE(u32, d, r[l]);
  set_predicate(w, i->d1, inside, mask);
}

enum { VOTE_ALL, VOTE_ANY, VOTE_UNI, VOTE_BALLOT };
static void op_VOTE(Warp *w, const Insn *i, u32 mask) {
  u32 p = predicate(w, i->s0) & mask;
  switch (i->mod) {
    case VOTE_ALL: set_predicate(w, i->d0, p == mask ? FULL : 0, mask); break;
    case VOTE_ANY: set_predicate(w, i->d0, p ? FULL : 0, mask); break;
    case VOTE_UNI: set_predicate(w, i->d0, !p || p == mask ? FULL : 0, mask); break;
    case VOTE_BALLOT: {
      u32 *d = slot(w, i->d0);
      WRITE(u32, d, p);
    }
  }
}
static void op_ELECT(Warp *w, const Insn *i, u32 mask) {
  u32 leader = __builtin_ctz(mask), *d = slot(w, i->d0);
  WRITE(u32, d, leader);
  set_predicate(w, i->d1, 1u << leader, mask);
}
enum { REDUX_ADD, REDUX_MIN_S, REDUX_MAX_S, REDUX_MIN_U, REDUX_MAX_U, REDUX_AND, REDUX_OR, REDUX_XOR };
static void op_REDUX(Warp *w, const Insn *i, u32 mask) {
  const u32 *a = slot(w, i->s0);
  u32 r = a[__builtin_ctz(mask)], first = 1, *d = slot(w, i->d0);
  LANES if (mask >> l & 1) {
    if (first) {
      first = 0;
      continue;
    }
    switch (i->mod) {
      case REDUX_ADD: r += a[l]; break;
      case REDUX_MIN_S: r = MIN((i32)r, (i32)a[l]); break;
      case REDUX_MAX_S: r = MAX((i32)r, (i32)a[l]); break;
      case REDUX_MIN_U: r = MIN(r, a[l]); break;
      case REDUX_MAX_U: r = MAX(r, a[l]); break;
      case REDUX_AND: r &= a[l]; break;
      case REDUX_OR: r |= a[l]; break;
      case REDUX_XOR: r ^= a[l]; break;
    }
  }
  WRITE(u32, d, r);
}
static void op_ACTIVEMASK(Warp *w, const Insn *i, u32 mask) {
  u32 *d = slot(w, i->d0);
  WRITE(u32, d, mask);
}

/* --- named barriers ----------------------------------------------------------------------------------------------- */

static void wake(Cta *cta, i32 kind, i32 id) {
  for (i32 n = 0; n < cta->machine->threads / 32; n++) {
    Warp *w = &cta->warps[n];
    if (w->wait == kind && w->wait_id == id) w->wait = WAIT_NONE;
  }
  cta->machine->progress++;
}

/* One warp arrives with 32 threads. The last one completes the barrier: those that wait learn what all arrivers knew.
 */
static void barrier_arrive(Warp *w, i32 id, u32 expected, i32 waits, i32 acquires) {
  Cta *cta = w->cta;
  Machine *m = cta->machine;
  if (id < 0 || id > 16 || (expected & 31) || expected > (u32)m->threads || !expected) {
    fatal(m, FIND_BARRIER, -1, w->pc, cta, w->index, -1, SPACE_BARRIER, (u64)id << 32 | expected);
    return;
  }
  Barrier *b = &cta->barriers[id];
  if (b->arrived && b->expected != expected)
    find(m, FIND_BARRIER, -1, w->pc, cta, w->index, -1, SPACE_BARRIER, (u64)id << 32 | expected);
  if (w->active != w->live) find(m, FIND_CONVERGENCE, -1, w->pc, cta, w->index, -1, SPACE_LANES, w->live & ~w->active);
  b->expected = expected;
  b->arrived += 32;
  release(w, w->active, &b->released);
  m->progress++;
  if (waits) {
    w->wait = WAIT_BARRIER;
    w->wait_id = id;
    w->wait_pc = w->pc;
  }
  if (b->arrived < expected) return;
  b->arrived = 0;
  for (i32 n = 0; n < m->threads / 32; n++) {
    Warp *other = &cta->warps[n];
    if (other->wait == WAIT_BARRIER && other->wait_id == id) {
      other->wait = WAIT_NONE;
      if (acquires) acquire(other, other->active, b->released);
    }
  }
  drop(cta, b->released);
  b->released = 0;
}

static void op_BAR_SYNC(Warp *w, const Insn *i, u32 mask) {
  u32 lane = __builtin_ctz(mask);
  u32 count = i->s1 == i->s0 && i->mod ? (u32)w->cta->machine->threads : slot(w, i->s1)[lane];
  barrier_arrive(w, slot(w, i->s0)[lane], count, 1, 1);
}
static void op_BAR_ARRIVE(Warp *w, const Insn *i, u32 mask) {
  u32 lane = __builtin_ctz(mask);
  barrier_arrive(w, slot(w, i->s0)[lane], slot(w, i->s1)[lane], 0, 1);
}
/* A cluster of one CTA: barrier 16, whose arrive and wait are two instructions. */
static void op_CLUSTER_ARRIVE(Warp *w, const Insn *i, u32 mask) {
  (void)i;
  (void)mask;
  Barrier *b = &w->cta->barriers[16];
  w->wait_value = b->generation;
  b->arrived += 32;
  release(w, w->active, &b->released);
  w->cta->machine->progress++;
  if (b->arrived == (u32)w->cta->machine->threads) {
    b->arrived = 0;
    b->generation++;
    wake(w->cta, WAIT_BARRIER, 16);
  }
}
static i32 op_CLUSTER_WAIT(Warp *w, const Insn *i, u32 mask) {
  (void)i;
  Barrier *b = &w->cta->barriers[16];
  if (b->generation == w->wait_value) {
    w->wait = WAIT_BARRIER;
    w->wait_id = 16;
    w->wait_pc = w->pc;
    return 0;
  }
  acquire(w, mask, b->released);
  return 1;
}

/* --- mbarriers ---------------------------------------------------------------------------------------------------- */

static u32 shared_offset(u64 address) { return (u32)(address >= SHARED_WINDOW ? address - SHARED_WINDOW : address); }

static Mbarrier *mbarrier_at(Cta *cta, u32 address, i32 warp, i32 lane, i32 pc, i32 must_be_valid) {
  Machine *m = cta->machine;
  if ((address & 7) || address + 8 > (u32)m->shared_bytes) {
    fatal(m, address & 7 ? FIND_ALIGN : FIND_BOUNDS, -1, pc, cta, warp, lane, SPACE_SHARED, address);
    return 0;
  }
  Mbarrier *b = &cta->mbarriers[address >> 3];
  if (must_be_valid && !b->valid) {
    fatal(m, FIND_MBARRIER, -1, pc, cta, warp, lane, SPACE_SHARED, address);
    return 0;
  }
  return b;
}

/* Any use of an mbarrier has to be ordered after its init; one by the async proxy also behind a fence. */
static void check_init(Machine *m, const Actor *a, Mbarrier *b, u32 address) {
  if (!m->detect) return;
  if (!knows(a, b->init_epoch))
    find(m, FIND_RACE_RAW, b->init_pc, a->pc, a->cta, a->warp, a->lane, SPACE_SHARED, address);
  if (a->async && !b->init_fenced && !sees_through_async_proxy(a, b->init_epoch))
    find(m, FIND_FENCE, b->init_pc, a->pc, a->cta, a->warp, a->lane, SPACE_SHARED, address);
}

/* An mbarrier counts up to 2^20 - 1 bytes, either way, and as many arrivals. */
enum { MOST_PENDING = (1 << 20) - 1 };
static i32 transfer_fits(Cta *cta, const Mbarrier *b, u32 address, i32 pc, i32 warp, i32 lane) {
  if (b->tx <= MOST_PENDING && b->tx >= -MOST_PENDING) return 1;
  fatal(cta->machine, FIND_MBARRIER, b->init_pc, pc, cta, warp, lane, SPACE_SHARED, address);
  return 0;
}

static void complete_phase_if_due(Cta *cta, Mbarrier *b, u32 address) {
  cta->machine->progress++;
  if (b->pending || b->tx) return;
  b->phase++;
  b->pending = b->expected;
  drop(cta, b->completed);
  b->completed = keep(b->released);
  wake(cta, WAIT_MBARRIER, address);
}

static void mbarrier_arrive(Cta *cta, Mbarrier *b, u32 address, u32 count, i32 pc, i32 warp, i32 lane) {
  if (count > b->pending) {
    fatal(cta->machine, FIND_MBARRIER, b->init_pc, pc, cta, warp, lane, SPACE_SHARED, address);
    return;
  }
  b->pending -= count;
  complete_phase_if_due(cta, b, address);
}

static void op_MBAR_INIT(Warp *w, const Insn *i, u32 mask) {
  Machine *m = w->cta->machine;
  LANES if (mask >> l & 1) {
    u32 address = shared_offset(i->mod ? slot64(w, i->s0)[l] : slot(w, i->s0)[l]) + i->imm, count = slot(w, i->s1)[l];
    Mbarrier *b = mbarrier_at(w->cta, address, w->index, l, w->pc, 0);
    if (!b) return;
    Actor a = lane_actor(w, l, w->pc);
    if (!b->valid) shared_at(m, &a, address, 8, 8, 1);
    if (b->valid || !count || count > MOST_PENDING)
      find(m, FIND_MBARRIER, b->init_pc, w->pc, w->cta, w->index, l, SPACE_SHARED, address);
    drop(w->cta, b->released);
    drop(w->cta, b->completed);
    *b = (Mbarrier){1, count, count, 0, w->pc, a.epoch, 0, 0, 0, 0};
  }
}
static void op_MBAR_INVAL(Warp *w, const Insn *i, u32 mask) {
  LANES if (mask >> l & 1) {
    u32 address = shared_offset(i->mod ? slot64(w, i->s0)[l] : slot(w, i->s0)[l]) + i->imm;
    Mbarrier *b = mbarrier_at(w->cta, address, w->index, l, w->pc, 1);
    if (b) b->valid = 0;
  }
}

/* mod: 1 a 64-bit address, 2 expect_tx first, 4 no arrive. s1 is the count or the bytes; d0 the token. */
static void op_MBAR_ARRIVE(Warp *w, const Insn *i, u32 mask) {
  Cta *cta = w->cta;
  LANES if (mask >> l & 1) {
    u32 address = shared_offset(i->mod & 1 ? slot64(w, i->s0)[l] : slot(w, i->s0)[l]) + i->imm;
    u32 value = slot(w, i->s1)[l];
    Mbarrier *b = mbarrier_at(cta, address, w->index, l, w->pc, 1);
    if (!b || cta->machine->fatal) return;
    Actor a = lane_actor(w, l, w->pc);
    check_init(cta->machine, &a, b, address);
    slot64(w, i->d0)[l] = b->phase;
    if (i->mod & 2) {
      b->tx += value;
      if (!transfer_fits(cta, b, address, w->pc, w->index, l)) return;
    }
    if (i->mod & 4) continue;
    release(w, 1u << l, &b->released);
    mbarrier_arrive(cta, b, address, i->mod & 2 ? 1 : value, w->pc, w->index, l);
  }
}

/* Whether the phase that is asked about has completed; lanes for which it has learn what its arrivers knew. A warp
   whose wait fails sleeps until the barrier changes. A try_wait may fail for no reason. */
static i32 mbar_wait(Warp *w, const Insn *i, u32 mask, i32 by_token, i32 spurious) {
  Cta *cta = w->cta;
  u32 done = 0, waiting_for = 0;
  LANES if (mask >> l & 1) {
    u32 address = shared_offset(i->mod & 1 ? slot64(w, i->s0)[l] : slot(w, i->s0)[l]) + i->imm;
    Mbarrier *b = mbarrier_at(cta, address, w->index, l, w->pc, 1);
    if (!b) return 0;
    Actor a = lane_actor(w, l, w->pc);
    check_init(cta->machine, &a, b, address);
    u32 asked = by_token ? (u32)slot64(w, i->s1)[l] & 1 : slot(w, i->s1)[l] & 1;
    if ((b->phase & 1) != asked && !spurious) {
      done |= 1u << l;
    } else {
      waiting_for = address;
    }
  }
  u32 left = done;
  while (left) { /* lanes that ask about one barrier learn together */
    u32 first = __builtin_ctz(left), same = 0;
#define ADDRESS(l) (shared_offset(i->mod & 1 ? slot64(w, i->s0)[l] : slot(w, i->s0)[l]) + i->imm)
    u32 address = ADDRESS(first);
    LANES if ((left >> l & 1) && ADDRESS(l) == address) same |= 1u << l;
    acquire(w, same, cta->mbarriers[address >> 3].completed);
    left &= ~same;
  }
  set_predicate(w, i->d0, done, mask);
  if (done == mask) return 1;
  if (!spurious) {
    w->wait = WAIT_MBARRIER;
    w->wait_id = waiting_for;
    w->wait_pc = w->pc;
  }
  return 0;
}

static void op_FENCE_MBAR_INIT(Warp *w, const Insn *i, u32 mask) {
  (void)i;
  Cta *cta = w->cta;
  for (i32 n = 0; n < cta->machine->shared_bytes / 8; n++) {
    Mbarrier *b = &cta->mbarriers[n];
    if (!b->valid || b->init_fenced) continue;
    i32 lane = (i32)AGENT(b->init_epoch) - 1 - w->index * 32;
    if (lane >= 0 && lane < 32 && (mask >> lane & 1)) b->init_fenced = 1;
  }
}
