/* The interpreter: one warp, instruction by instruction, lanes that part and meet again. */

/* Lanes that run are those with the lowest pc, but for lanes that are held at an instruction which needs others, and
   those that nap after a wait that failed. */
static i32 regroup(Warp *w) {
  Machine *m = w->cta->machine;
  LANES if (w->active >> l & 1) w->lane_pc[l] = w->pc;
  u32 awake = w->live & ~w->held & ~w->at_warp_barrier, best = FULL;
  if (!(awake & ~w->napping)) w->napping = 0;
  u32 candidates = awake & ~w->napping;
  if (!candidates) {
    i32 pc = w->live ? (i32)w->lane_pc[__builtin_ctz(w->live)] : -1;
    fatal(m, FIND_CONVERGENCE, -1, pc, w->cta, w->index, -1, SPACE_LANES, w->live);
    return 0;
  }
  LANES if ((candidates >> l & 1) && w->lane_pc[l] < best) best = w->lane_pc[l];
  u32 group = 0;
  LANES if ((w->live & ~w->at_warp_barrier) >> l & 1) if (w->lane_pc[l] == best) group |= 1u << l;
  w->held &= ~group;
  w->napping &= ~group;
  w->active = group;
  w->pc = best;
  return 1;
}

/* Whether the lanes of `needed` are all here; else these wait for them and others go on. */
static i32 converge(Warp *w, u32 needed) {
  if (!(needed & w->live & ~w->active)) return 1;
  LANES if (w->active >> l & 1) w->lane_pc[l] = w->pc;
  w->held |= w->active;
  w->active = 0;
  return 0;
}

/* Member masks. The lanes that these name together. */
static u32 named(const u32 *masks, u32 lanes) {
  u32 all = 0;
  LANES all |= lanes >> l & 1 ? masks[l] : 0;
  return all;
}

/* The first of these lanes and all that have the same mask: they execute an instruction together, apart from others. */
static u32 same_mask(const u32 *masks, u32 lanes) {
  u32 mask = masks[__builtin_ctz(lanes)], group = 0;
  LANES group |= (u32)(masks[l] == mask) << l;
  return group & lanes;
}

/* A lane has to be in its own mask, and all that it names have to be here: those that have exited, or whose predicate
   is false, are not. */
static void check_members(Warp *w, u32 group, u32 mask) {
  if (group != mask)
    find(w->cta->machine, FIND_CONVERGENCE, -1, w->pc, w->cta, w->index, -1, SPACE_LANES, group ^ mask);
}

/* bar.warp.sync of lanes that have one mask. Those that have exited are not waited for. */
static void warp_barrier(Warp *w, u32 group, u32 needed) {
  u32 here = group | w->at_warp_barrier;
  if (group & ~needed)
    fatal(w->cta->machine, FIND_CONVERGENCE, -1, w->pc, w->cta, w->index, -1, SPACE_LANES, group & ~needed);
  if (needed & w->live & ~here) {
    LANES if (group >> l & 1) w->lane_pc[l] = w->pc;
    w->at_warp_barrier |= group;
    w->active &= ~group;
    return;
  }
  order_lanes(w, needed & w->live);
  LANES if (w->at_warp_barrier & needed & (1u << l)) w->lane_pc[l]++;
  w->at_warp_barrier &= ~needed;
}

/* Run one warp for at most `quantum` instructions, or until it waits. */
static void run_warp(Machine *m, Warp *w, i64 quantum) {
  w->napping = 0;
  while (quantum-- > 0 && !m->fatal) {
    if (!w->active || (w->active != w->live)) {
      if (!w->live) break;
      if (!regroup(w)) return;
    }
    const Insn *i = &m->code[w->pc];
    u32 mask = w->active;
    if (i->guard) mask &= predicate(w, i->guard);
    m->executed++;
    w->executed++;
    if (w->counts) w->counts[w->pc]++;
    if (i->touches && mask) {
      check_wgmma_registers(w, m->lists + i->touches);
      if (w->tc5_loads) check_loaded_registers(w, m->lists + i->touches);
    }
    switch (i->op) {
      case OP_BRA: {
        u32 others = w->active & ~mask;
        if (!mask) break;
        if (!others) {
          w->pc = i->target;
          continue;
        }
        LANES if (w->active >> l & 1) w->lane_pc[l] = mask >> l & 1 ? (u32)i->target : w->pc + 1;
        w->active = 0;
        continue;
      }
      case OP_RET: {
        if (!mask) break;
        u32 others = w->active & ~mask;
        LANES if (others >> l & 1) w->lane_pc[l] = w->pc + 1;
        w->live &= ~mask;
        w->active = 0;
        m->progress++;
        if (w->live) continue;
        w->wait = WAIT_DONE;
        w->cta->warps_left--;
        return;
      }
      case OP_NOP: break;
      case OP_TRAP:
        if (mask) fatal(m, FIND_CONVERGENCE, -1, w->pc, w->cta, w->index, -1, SPACE_LANES, mask);
        break;
      case OP_BAR_WARP:
        if (!mask) break;
        if (mask != w->active) { /* the others go on */
          LANES if (w->active >> l & 1) w->lane_pc[l] = w->pc + !(mask >> l & 1);
          w->active = 0;
          continue;
        }
        for (u32 left = mask; left;) {
          const u32 *masks = slot(w, i->s0);
          u32 needed = masks[__builtin_ctz(left)], group = same_mask(masks, left);
          warp_barrier(w, group, needed);
          left &= ~group;
        }
        if (!w->active) continue;
        break;
      case OP_SETMAXNREG:
        if (!converge(w, FULL)) continue;
        break;
      case OP_BAR_SYNC:
        if (!mask) break;
        if (!converge(w, FULL)) continue;
        op_BAR_SYNC(w, i, mask);
        w->pc++;
        if (w->wait) return;
        continue;
      case OP_CLUSTER_WAIT:
        if (mask && !op_CLUSTER_WAIT(w, i, mask)) return;
        break;
      case OP_CP_ASYNC_WAIT:
        if (mask && !op_CP_ASYNC_WAIT(w, i, mask)) return;
        break;
      case OP_BULK_WAIT:
        if (mask && !op_BULK_WAIT(w, i, mask)) return;
        break;
      case OP_WGMMA_WAIT:
        if (!mask) break;
        if (!converge(w, FULL)) continue;
        if (!op_WGMMA_WAIT(w, i, mask)) return;
        break;
      case OP_TC5_ALLOC:
        if (!mask) break;
        if (!converge(w, FULL)) continue;
        if (!op_TC5_ALLOC(w, i, mask)) return;
        break;
      case OP_MBAR_WAIT_PARITY:
      case OP_MBAR_WAIT_TOKEN: {
        if (!mask) break;
        i32 spurious = m->policy && (i->mod & 8) && draw(m, 8) == 0;
        if (mbar_wait(w, i, mask, i->op == OP_MBAR_WAIT_TOKEN, spurious)) break;
        w->pc++;
        /* Other lanes of the warp may be what these wait for: let those go on first. */
        if (w->live & ~w->active & ~w->held & ~w->at_warp_barrier & ~w->napping) {
          LANES if (w->active >> l & 1) w->lane_pc[l] = w->pc;
          w->napping |= w->active;
          w->active = 0;
          w->wait = WAIT_NONE;
          continue;
        }
        return;
      }
      case OP_MBAR_EXPECT_TX:
      case OP_MBAR_ARRIVE_EXPECT_TX:
        if (mask) op_MBAR_ARRIVE(w, i, mask);
        break;
      case OP_FENCE_PROXY_ASYNC:
        if (mask) fence_proxy(w, mask);
        break;
      case OP_FENCE:
      case OP_TC5_FENCE_BEFORE:
      case OP_TC5_FENCE_AFTER:
        break;
        /* clang-format off */
#define OP(name)
#define PLAIN(name)                  \
  case OP_##name:                    \
    if (mask) op_##name(w, i, mask); \
    break;
#define CONVERGED(name)                                              \
  case OP_##name:                                                    \
    if (!mask) break;                                                \
    if (!converge(w, named(slot(w, i->s3), mask))) continue;         \
    for (u32 left = mask; left;) {                                   \
      u32 group = same_mask(slot(w, i->s3), left);                       \
      check_members(w, group, slot(w, i->s3)[__builtin_ctz(left)]); \
      op_##name(w, i, group);                                        \
      left &= ~group;                                                \
    }                                                                \
    break;
#define ALIGNED(name)                 \
  case OP_##name:                     \
    if (!mask) break;                 \
    if (!converge(w, FULL)) continue; \
    op_##name(w, i, mask);            \
    break;
#include "opcodes.h"
#undef OP
#undef PLAIN
#undef CONVERGED
#undef ALIGNED
        /* clang-format on */
      default: fatal(m, FIND_LIMIT, -1, w->pc, w->cta, w->index, -1, SPACE_VALUE, i->op); /* no case: never skipped */
    }
    w->pc++;
  }
}
