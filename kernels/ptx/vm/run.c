/* Loads and stores, the interpreter, and the scheduler. */

/* mod: space, log2 of element bytes << 2, sign extension << 5, a 64-bit address << 6, whole b64 registers << 7; imm the
   offset; list the n registers. */
static void op_LD(Warp *w, const Insn *i, u32 mask) {
  Machine *m = w->cta->machine;
  const i32 *d = m->lists + i->list;
  i32 space = i->mod & 3, log_bytes = i->mod >> 2 & 7, bytes = 1 << log_bytes;
  u32 total = bytes * i->n;
  LANES if (mask >> l & 1) {
    Actor a = lane_actor(w, l, w->pc);
    u64 address = (i->mod >> 6 & 1 ? slot64(w, i->s0)[l] : slot(w, i->s0)[l]) + (i64)i->imm;
    const u8 *from = lane_memory(m, &a, space, address, total, total, ACCESS_READ);
    if (!from) return;
    for (i32 n = 0; n < i->n; n++) {
      u64 value = 0;
      memcpy(&value, from + n * bytes, bytes);
      if (i->mod >> 5 & 1) value = (u64)((i64)(value << (64 - 8 * bytes)) >> (64 - 8 * bytes));
      if (i->mod >> 7 & 1) slot64(w, d[n])[l] = value;
      else slot(w, d[n])[l] = (u32)value;
    }
  }
}
static void op_ST(Warp *w, const Insn *i, u32 mask) {
  Machine *m = w->cta->machine;
  const i32 *d = m->lists + i->list;
  i32 space = i->mod & 3, bytes = 1 << (i->mod >> 2 & 7);
  u32 total = bytes * i->n;
  LANES if (mask >> l & 1) {
    Actor a = lane_actor(w, l, w->pc);
    u64 address = (i->mod >> 6 & 1 ? slot64(w, i->s0)[l] : slot(w, i->s0)[l]) + (i64)i->imm;
    u8 *to = lane_memory(m, &a, space, address, total, total, ACCESS_WRITE);
    if (!to) return;
    for (i32 n = 0; n < i->n; n++) {
      u64 value = i->mod >> 7 & 1 ? slot64(w, d[n])[l] : slot(w, d[n])[l];
      memcpy(to + n * bytes, &value, bytes);
    }
  }
}
/* Parameters are the same for all lanes. imm the offset, mod log2 of the bytes, sign extension << 5 and whole b64 registers
   << 7, list the n registers. */
static void op_LD_PARAM(Warp *w, const Insn *i, u32 mask) {
  Machine *m = w->cta->machine;
  i32 bytes = 1 << (i->mod & 7);
  for (i32 n = 0; n < i->n; n++) {
    u64 value = 0;
    memcpy(&value, m->params + i->imm + n * bytes, bytes);
    if (i->mod >> 5 & 1) value = (u64)((i64)(value << (64 - 8 * bytes)) >> (64 - 8 * bytes));
    i32 to = m->lists[i->list + n];
    if (i->mod >> 7 & 1) { u64 *d = slot64(w, to); WRITE(u64, d, value); }
    else { u32 *d = slot(w, to); WRITE(u32, d, value); }
  }
}
enum { ATOM_ADD_U32, ATOM_ADD_F32, ATOM_EXCH, ATOM_MIN_U, ATOM_MAX_U, ATOM_AND, ATOM_OR, ATOM_CAS, ATOM_ADD_U64,
       ATOM_MIN_S, ATOM_MAX_S, ATOM_XOR };
/* mod: space, has a result << 2, a 64-bit address << 6; target the operation; s1 the value, list the n values of a vector. */
static void op_ATOM(Warp *w, const Insn *i, u32 mask) {
  Machine *m = w->cta->machine;
  i32 space = i->mod & 3, bytes = i->target == ATOM_ADD_U64 ? 8 : 4;
  LANES if (mask >> l & 1) {
    Actor a = lane_actor(w, l, w->pc);
    u64 address = (i->mod >> 6 & 1 ? slot64(w, i->s0)[l] : slot(w, i->s0)[l]) + (i64)i->imm;
    u8 *at = lane_memory(m, &a, space, address, bytes * i->n, bytes * i->n, ACCESS_ATOMIC);
    if (!at) return;
    i32 in_global = space == SPACE_GLOBAL || (space == SPACE_GENERIC && address < SHARED_WINDOW);
    if (bytes == 8) {
      u64 old, value = slot64(w, m->lists[i->list])[l];
      memcpy(&old, at, 8);
      value += old;
      memcpy(at, &value, 8);
      if (i->mod >> 2 & 1) slot64(w, i->d0)[l] = old;
      continue;
    }
    for (i32 n = 0; n < i->n; n++) {
      u32 old, value = slot(w, m->lists[i->list + n])[l];
      memcpy(&old, at + 4 * n, 4);
      switch (i->target) {
        case ATOM_ADD_U32: value += old; break;
        case ATOM_ADD_F32: value = atomic_add(old, value, in_global); break;
        case ATOM_MIN_U: value = MIN(value, old); break;
        case ATOM_MAX_U: value = MAX(value, old); break;
        case ATOM_MIN_S: value = MIN((i32)value, (i32)old); break;
        case ATOM_MAX_S: value = MAX((i32)value, (i32)old); break;
        case ATOM_AND: value &= old; break;
        case ATOM_OR: value |= old; break;
        case ATOM_XOR: value ^= old; break;
        case ATOM_CAS: value = old == value ? slot(w, i->s2)[l] : old; break;
      }
      memcpy(at + 4 * n, &value, 4);
      if (i->mod >> 2 & 1) slot(w, i->d0)[l] = old;
    }
  }
}
/* n matrices of 8 rows of 16 bytes; lane 8 j + r has the address of row r of matrix j. mod 1: transposed, 2: 64-bit
   addresses. */
static void op_LDMATRIX(Warp *w, const Insn *i, u32 mask) {
  Machine *m = w->cta->machine;
  if (mask != FULL) find(m, FIND_CONVERGENCE, -1, w->pc, w->cta, w->index, -1, 0, 0);
  u16 rows[4][8][8];
  for (i32 j = 0; j < i->n; j++)
    for (i32 r = 0; r < 8; r++) {
      i32 lane = 8 * j + r;
      Actor a = lane_actor(w, lane, w->pc);
      u32 address = shared_offset(i->mod & 2 ? slot64(w, i->s0)[lane] : slot(w, i->s0)[lane]) + i->imm;
      u8 *from = shared_at(m, &a, address, 16, 16, 0);
      if (!from) return;
      memcpy(rows[j][r], from, 16);
    }
  for (i32 j = 0; j < i->n; j++) {
    u32 *d = slot(w, m->lists[i->list + j]);
    LANES {
      u32 r = l / 4, c = 2 * (l % 4);
      d[l] = i->mod & 1 ? (u32)rows[j][c + 1][r] << 16 | rows[j][c][r] : (u32)rows[j][r][c + 1] << 16 | rows[j][r][c];
    }
  }
}
static void op_STMATRIX(Warp *w, const Insn *i, u32 mask) {
  Machine *m = w->cta->machine;
  if (mask != FULL) find(m, FIND_CONVERGENCE, -1, w->pc, w->cta, w->index, -1, 0, 0);
  for (i32 j = 0; j < i->n; j++) {
    u16 rows[8][8];
    const u32 *d = slot(w, m->lists[i->list + j]);
    LANES for (u32 h = 0; h < 2; h++) {
      u32 r = l / 4, c = 2 * (l % 4) + h;
      if (i->mod & 1) rows[c][r] = d[l] >> 16 * h;
      else rows[r][c] = d[l] >> 16 * h;
    }
    for (i32 r = 0; r < 8; r++) {
      i32 lane = 8 * j + r;
      Actor a = lane_actor(w, lane, w->pc);
      u32 address = shared_offset(i->mod & 2 ? slot64(w, i->s0)[lane] : slot(w, i->s0)[lane]) + i->imm;
      u8 *to = shared_at(m, &a, address, 16, 16, 1);
      if (!to) return;
      memcpy(to, rows[r], 16);
    }
  }
}

/* --- random numbers, and landing ---------------------------------------------------------------------------------- */

static u32 draw(Machine *m, u32 below) { /* xorshift64* */
  u64 x = m->random;
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  m->random = x;
  return (u32)((x * 2685821657736338717ull >> 33) % below);
}

/* Operations of one queue land in order; 0 is no queue. */
static i32 same_queue(const Async *a, const Async *b) {
  if (a->kind == ASYNC_WGMMA) return b->kind == ASYNC_WGMMA && a->warp == b->warp;
  if (a->kind == ASYNC_TC5_MMA || a->kind == ASYNC_TC5_COMMIT) return b->kind == ASYNC_TC5_MMA || b->kind == ASYNC_TC5_COMMIT;
  if (a->kind == ASYNC_CP_ARRIVE) return (b->kind == ASYNC_CP || b->kind == ASYNC_CP_ARRIVE) && a->warp == b->warp && (a->mask & b->mask);
  return 0;
}
static i32 may_land(Cta *cta, Async *op) {
  for (Async *before = cta->pending; before != op; before = before->next)
    if (same_queue(op, before)) return 0;
  return 1;
}

static void land(Cta *cta, Async *op) {
  Machine *m = cta->machine;
  Async **link = &cta->pending, *previous = 0;
  while (*link != op) previous = *link, link = &(*link)->next;
  *link = op->next;
  if (cta->pending_tail == op) cta->pending_tail = previous;
  switch (op->kind) {
    case ASYNC_CP: land_cp_async(cta, op); break;
    case ASYNC_CP_ARRIVE: land_cp_arrive(cta, op); break;
    case ASYNC_TMA_LOAD: land_tma(cta, op, 1); break;
    case ASYNC_TMA_STORE: land_tma(cta, op, 0); break;
    case ASYNC_BULK_LOAD: land_bulk_load(cta, op); break;
    case ASYNC_BULK_STORE: land_bulk_store(cta, op); break;
    case ASYNC_WGMMA: land_wgmma(cta, op); break;
    case ASYNC_TC5_MMA: land_tc5_mma(cta, op); break;
    case ASYNC_TC5_COMMIT: land_tc5_commit(cta, op); break;
  }
  m->landed++;
  m->progress++;
  for (i32 n = 0; n < m->threads / 32; n++)
    if (cta->warps[n].wait == WAIT_GROUP) cta->warps[n].wait = WAIT_NONE;
  drop(cta, op->knowledge);
  free(op);
}

/* --- the interpreter ---------------------------------------------------------------------------------------------- */

/* Lanes that run are those with the lowest pc, but for lanes that are held at an instruction which needs others, and those
   that nap after a wait that failed. */
static i32 regroup(Warp *w) {
  Machine *m = w->cta->machine;
  LANES if (w->active >> l & 1) w->lane_pc[l] = w->pc;
  u32 awake = w->live & ~w->held & ~w->at_warp_barrier, best = FULL;
  if (!(awake & ~w->napping)) w->napping = 0;
  u32 candidates = awake & ~w->napping;
  if (!candidates) {
    i32 pc = w->live ? (i32)w->lane_pc[__builtin_ctz(w->live)] : -1;
    fatal(m, FIND_CONVERGENCE, -1, pc, w->cta, w->index, -1, 0, w->live);
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

static void warp_barrier(Warp *w, u32 needed) {
  u32 here = w->active | w->at_warp_barrier;
  if (needed & w->live & ~here) {
    LANES if (w->active >> l & 1) w->lane_pc[l] = w->pc;
    w->at_warp_barrier |= w->active;
    w->active = 0;
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
      case OP_TRAP: if (mask) fatal(m, FIND_CONVERGENCE, -1, w->pc, w->cta, w->index, -1, 0, 1); break;
      case OP_BAR_WARP:
        if (!mask) break;
        warp_barrier(w, slot(w, i->s0)[__builtin_ctz(mask)]);
        if (!w->active) continue;
        break;
#define WARP_WIDE(name)                                                             \
  case OP_##name:                                                                   \
    if (!mask) break;                                                               \
    if (!converge(w, slot(w, i->s3)[__builtin_ctz(mask)])) continue;                \
    op_##name(w, i, mask);                                                          \
    break;
      WARP_WIDE(SHFL) WARP_WIDE(VOTE) WARP_WIDE(ELECT) WARP_WIDE(REDUX)
#define ALIGNED(name)                         \
  case OP_##name:                             \
    if (!mask) break;                         \
    if (!converge(w, FULL)) continue;         \
    op_##name(w, i, mask);                    \
    break;
      ALIGNED(WGMMA) ALIGNED(WGMMA_FENCE) ALIGNED(WGMMA_COMMIT) ALIGNED(LDMATRIX) ALIGNED(STMATRIX)
      ALIGNED(CLUSTER_ARRIVE) ALIGNED(BAR_ARRIVE)
      case OP_SETMAXNREG: if (!converge(w, FULL)) continue; break;
      case OP_BAR_SYNC:
        if (!mask) break;
        if (!converge(w, FULL)) continue;
        op_BAR_SYNC(w, i, mask);
        w->pc++;
        if (w->wait) return;
        continue;
#define WAITS(name, call)           \
  case OP_##name:                   \
    if (!mask) break;               \
    if (!(call)) {                  \
      if (w->wait || m->fatal) return; \
    }                               \
    break;
      case OP_CLUSTER_WAIT: if (mask && !op_CLUSTER_WAIT(w, i, mask)) return; break;
      case OP_CP_ASYNC_WAIT: if (mask && !op_CP_ASYNC_WAIT(w, i, mask)) return; break;
      case OP_BULK_WAIT: if (mask && !op_BULK_WAIT(w, i, mask)) return; break;
      case OP_WGMMA_WAIT:
        if (!converge(w, FULL)) continue;
        if (!op_WGMMA_WAIT(w, i, mask)) return;
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
      ALIGNED(TC5_DEALLOC) ALIGNED(TC5_RELINQUISH) ALIGNED(TC5_LD) ALIGNED(TC5_ST) ALIGNED(TC5_WAIT)
      case OP_TC5_ALLOC:
        if (!converge(w, FULL)) continue;
        if (!op_TC5_ALLOC(w, i, mask)) return;
        break;
      case OP_TC5_FENCE_BEFORE:
      case OP_TC5_FENCE_AFTER: break;
      default: fatal(m, FIND_LIMIT, -1, w->pc, w->cta, w->index, -1, 0, i->op); break; /* no case: never skipped */
      case OP_FENCE_PROXY_ASYNC: if (mask) fence_proxy(w, mask); break;
#define SIMPLE(name) case OP_##name: if (mask) op_##name(w, i, mask); break;
      SIMPLE(FENCE_MBAR_INIT)
      case OP_FENCE: break;
      SIMPLE(ACTIVEMASK) SIMPLE(MBAR_INIT) SIMPLE(MBAR_INVAL)
      case OP_MBAR_EXPECT_TX:
      case OP_MBAR_ARRIVE_EXPECT_TX:
      SIMPLE(MBAR_ARRIVE)
      SIMPLE(LD) SIMPLE(ST) SIMPLE(LD_PARAM) SIMPLE(ATOM) SIMPLE(CP_ASYNC) SIMPLE(CP_ASYNC_COMMIT)
      SIMPLE(CP_ASYNC_MBAR_ARRIVE) SIMPLE(TMA_LOAD) SIMPLE(TMA_STORE) SIMPLE(BULK_LOAD) SIMPLE(BULK_STORE)
      SIMPLE(BULK_COMMIT) SIMPLE(TC5_MMA) SIMPLE(TC5_COMMIT)
      SIMPLE(ADD32) SIMPLE(ADD64) SIMPLE(SUB32) SIMPLE(SUB64) SIMPLE(MUL32) SIMPLE(MUL64) SIMPLE(MULHI_S32)
      SIMPLE(MULHI_U32) SIMPLE(MULWIDE_S32) SIMPLE(MULWIDE_U32) SIMPLE(MAD32) SIMPLE(MAD64) SIMPLE(MADWIDE_S32)
      SIMPLE(MADWIDE_U32) SIMPLE(DIV_S32) SIMPLE(DIV_U32) SIMPLE(DIV_S64) SIMPLE(DIV_U64) SIMPLE(REM_S32)
      SIMPLE(REM_U32) SIMPLE(REM_S64) SIMPLE(REM_U64) SIMPLE(MIN_S32) SIMPLE(MIN_U32) SIMPLE(MIN_S64) SIMPLE(MIN_U64)
      SIMPLE(MAX_S32) SIMPLE(MAX_U32) SIMPLE(MAX_S64) SIMPLE(MAX_U64) SIMPLE(NEG32) SIMPLE(NEG64) SIMPLE(ABS32)
      SIMPLE(AND32) SIMPLE(AND64) SIMPLE(OR32) SIMPLE(OR64) SIMPLE(XOR32) SIMPLE(XOR64) SIMPLE(NOT32) SIMPLE(NOT64)
      SIMPLE(SHL32) SIMPLE(SHL64) SIMPLE(SHR_U32) SIMPLE(SHR_S32) SIMPLE(SHR_U64) SIMPLE(SHR_S64) SIMPLE(SHF_L)
      SIMPLE(SHF_R) SIMPLE(POPC32) SIMPLE(CLZ32) SIMPLE(BREV32) SIMPLE(BFIND_U32) SIMPLE(BFE_U32) SIMPLE(BFE_S32)
      SIMPLE(BFI32) SIMPLE(LOP3) SIMPLE(PRMT) SIMPLE(ADD16) SIMPLE(SUB16) SIMPLE(MUL16) SIMPLE(SHL16) SIMPLE(SHR_U16)
      SIMPLE(FADD) SIMPLE(FSUB) SIMPLE(FMUL) SIMPLE(FFMA) SIMPLE(FNEG) SIMPLE(FABS) SIMPLE(FMIN) SIMPLE(FMAX)
      SIMPLE(FDIV) SIMPLE(FRCP) SIMPLE(FSQRT) SIMPLE(FRSQRT) SIMPLE(FEX2) SIMPLE(FLG2) SIMPLE(FADD2) SIMPLE(FSUB2)
      SIMPLE(FMUL2) SIMPLE(FFMA2) SIMPLE(SETP_S32) SIMPLE(SETP_U32) SIMPLE(SETP_S64) SIMPLE(SETP_U64) SIMPLE(SETP_F32)
      SIMPLE(SETP_S16) SIMPLE(SETP_U16) SIMPLE(SELP32) SIMPLE(SELP64) SIMPLE(PAND) SIMPLE(POR) SIMPLE(PXOR) SIMPLE(PNOT)
      SIMPLE(PMOV) SIMPLE(CVT_U64_U32) SIMPLE(CVT_S64_S32) SIMPLE(CVT_U32_U64) SIMPLE(CVT_U32_U16) SIMPLE(CVT_S32_S16)
      SIMPLE(CVT_U32_U8) SIMPLE(CVT_S32_S8) SIMPLE(CVT_U64_U16) SIMPLE(CVT_U16_U32) SIMPLE(CVT_F32_BF16)
      SIMPLE(CVT_BF16_F32) SIMPLE(CVT_BF16X2_F32) SIMPLE(CVT_F32_F16) SIMPLE(CVT_F16_F32) SIMPLE(CVT_F16X2_F32)
      SIMPLE(CVT_F32_S32) SIMPLE(CVT_F32_U32) SIMPLE(CVT_S32_F32) SIMPLE(CVT_U32_F32) SIMPLE(MOV32) SIMPLE(MOV64)
      SIMPLE(MOV_SPECIAL) SIMPLE(PACK64) SIMPLE(UNPACK64) SIMPLE(PACK32) SIMPLE(UNPACK32)
    }
    w->pc++;
  }
}

/* --- the scheduler ------------------------------------------------------------------------------------------------ */

enum { POLICY_IN_ORDER, POLICY_RANDOM };

static void start_cta(Machine *m, Cta *cta, i32 index) {
  i32 warps = m->threads / 32, granules = m->shared_bytes >> m->granule_shift;
  cta->index = index;
  cta->warps_left = warps;
  cta->done = 0;
  cta->agents = 1 + m->threads;
  cta->pending = cta->pending_tail = 0;
  memset(cta->shared, 0xff, m->shared_bytes); /* poison: NaN as bf16, fp16 and fp32 */
  memset(cta->written, 0, granules * 4), memset(cta->read, 0, granules * 4);
  memset(cta->mbarriers, 0, (m->shared_bytes / 8 + 1) * sizeof(Mbarrier));
  memset(cta->barriers, 0, sizeof cta->barriers);
  cta->tc5_agent = cta->tc5_clock = cta->tmem_permit = 0, cta->tmem_live = 0;
  memset(cta->tmem_allocated, 0, sizeof cta->tmem_allocated);
  memset(cta->tma_agents, 0, sizeof cta->tma_agents), memset(cta->tma_clocks, 0, sizeof cta->tma_clocks);
  cta->free_reader_sets_count = 0;
  for (i32 n = 0; n < cta->reader_sets_used; n++) cta->free_reader_sets[cta->free_reader_sets_count++] = n;
  for (i32 n = 0; n < warps; n++) {
    Warp *w = &cta->warps[n];
    u32 *registers = w->registers, *predicates = w->predicates, *stamps = w->wgmma_stamp, *loading = w->tc5_loading;
    u64 *counts = w->counts;
    memset(w, 0, sizeof *w);
    w->cta = cta;
    w->index = n;
    w->registers = registers, w->predicates = predicates, w->wgmma_stamp = stamps, w->counts = counts;
    w->tc5_loading = loading;
    memset(loading, 0, (u64)m->slots * 4);
    memset(registers, 0xff, (u64)m->slots * 128);
    memset(stamps, 0, (u64)m->slots * 4);
    for (i32 p = 1; p < m->predicate_slots; p++) predicates[p] = draw(m, 1u << 31);
    predicates[0] = FULL;
    w->live = w->active = FULL;
    Knowledge *k = empty_knowledge(cta);
    LANES {
      w->knowledge[l] = keep(k);
      w->clock[l] = 1;
    }
    drop(cta, k);
  }
}

static void finish_cta(Machine *m, Cta *cta) {
  for (Async *op = cta->pending; op; op = op->next)
    if (op->kind != ASYNC_BULK_STORE && op->kind != ASYNC_TMA_STORE)
      find(m, FIND_PENDING, op->pc, -1, cta, op->warp, -1, 0, 0);
  /* Shared memory that an operation still reads when its CTA ends may be given to another one. */
  while (cta->pending) {
    Async *op = cta->pending;
    if (op->kind == ASYNC_BULK_STORE || op->kind == ASYNC_TMA_STORE) find(m, FIND_PENDING, op->pc, -1, cta, op->warp, -1, 0, 0);
    land(cta, op);
  }
  i32 warps = m->threads / 32;
  for (i32 n = 0; n < warps; n++) {
    Warp *w = &cta->warps[n];
    if ((n & 3) && w->wgmma_issued != cta->warps[n & ~3].wgmma_issued) find(m, FIND_WGMMA, -1, -1, cta, n, -1, 0, w->wgmma_issued);
    LANES drop(cta, w->knowledge[l]);
  }
  for (i32 n = 0; n < m->shared_bytes / 8; n++) {
    drop(cta, cta->mbarriers[n].released);
    drop(cta, cta->mbarriers[n].completed);
  }
  for (i32 n = 0; n < 17; n++) drop(cta, cta->barriers[n].released);
  if (cta->tmem_live) find(m, FIND_TMEM, -1, -1, cta, -1, -1, 3, cta->tmem_live);
  cta->done = 1;
}

/* Land one operation of any CTA: the oldest in order, else one at random. */
static i32 land_one(Machine *m, Cta *ctas, i32 resident) {
  i32 first = m->policy ? (i32)draw(m, resident) : 0;
  for (i32 n = 0; n < resident; n++) {
    Cta *cta = &ctas[(first + n) % resident];
    if (cta->done || !cta->pending) continue;
    if (!m->policy) {
      land(cta, cta->pending);
      return 1;
    }
    i32 count = 0;
    Async *chosen = 0;
    for (Async *op = cta->pending; op && count < 64; op = op->next)
      if (may_land(cta, op) && draw(m, ++count) == 0) chosen = op;
    if (chosen) {
      land(cta, chosen);
      return 1;
    }
  }
  return 0;
}

static void report_deadlock(Machine *m, Cta *ctas, i32 resident) {
  m->fatal = 1;
  for (i32 n = 0; n < resident; n++)
    for (i32 k = 0; !ctas[n].done && k < m->threads / 32; k++) {
      Warp *w = &ctas[n].warps[k];
      i32 before = m->finding_count;
      if (!w->wait || w->wait == WAIT_DONE) continue;
      find(m, FIND_DEADLOCK, w->wait, w->wait_pc, &ctas[n], k, -1, SPACE_SHARED, w->wait_id);
      if (m->finding_count == before) return; /* the list is full */
      Finding *f = &m->findings[before];
      if (w->wait == WAIT_MBARRIER) {
        const Mbarrier *b = &ctas[n].mbarriers[w->wait_id >> 3];
        f->state[0] = b->phase, f->state[1] = b->pending, f->state[2] = b->tx;
      } else if (w->wait == WAIT_BARRIER) {
        const Barrier *b = &ctas[n].barriers[w->wait_id];
        f->state[0] = b->arrived, f->state[1] = b->expected;
      }
    }
}

/* Run all CTAs, `resident` of them at a time. Returns the number of findings. */
static i32 schedule(Machine *m, Cta *ctas, i32 resident) {
  i32 next = 0, live = 0, warps = m->threads / 32;
  for (i32 n = 0; n < resident; n++) start_cta(m, &ctas[n], next++), live++;
  u64 stuck_at = ~0ull;
  i32 cursor = 0;
  while (live && !m->fatal) {
    /* Asynchronous operations: at once in order; at random, or as late as possible. */
    if (!m->policy) {
      while (!m->fatal && land_one(m, ctas, resident)) {}
    } else if (!m->late && draw(m, 4)) {
      for (u32 n = draw(m, 6); n && !m->fatal; n--) land_one(m, ctas, resident);
    }
    if (m->fatal) break;
    Warp *chosen = 0;
    i32 total = resident * warps, start = m->policy ? (i32)draw(m, total) : cursor;
    for (i32 n = 0; n < total; n++) {
      i32 at = (start + n) % total;
      if (ctas[at / warps].done) continue;
      Warp *w = &ctas[at / warps].warps[at % warps];
      if (w->wait != WAIT_NONE) continue;
      if (m->starve_left && m->starved_warp >= 0 && (at % warps) % MAX(1, warps / 4) == m->starved_warp) {
        if (!chosen) chosen = w; /* only if nothing else can run */
        continue;
      }
      chosen = w;
      cursor = (at + 1) % total;
      break;
    }
    if (m->policy) {
      if (m->starve_left) m->starve_left--;
      else if (draw(m, 64) == 0) m->starve_left = draw(m, 400), m->starved_warp = draw(m, MAX(1, warps / 4) + 1) - 1;
    }
    if (!chosen) {
      if (land_one(m, ctas, resident)) continue;
      /* Nothing runs and nothing is in flight: let those that sleep look once more. */
      if (stuck_at == m->progress) {
        report_deadlock(m, ctas, resident);
        break;
      }
      stuck_at = m->progress;
      for (i32 n = 0; n < resident; n++)
        for (i32 k = 0; k < warps; k++)
          if (!ctas[n].done && ctas[n].warps[k].wait == WAIT_MBARRIER) ctas[n].warps[k].wait = WAIT_NONE;
      continue;
    }
    static const i32 quanta[8] = {1, 2, 7, 30, 100, 300, 1000, 4000};
    run_warp(m, chosen, m->policy ? quanta[draw(m, 8)] : 1 << 20);
    if (m->executed > m->instruction_limit) fatal(m, FIND_LIMIT, -1, chosen->pc, chosen->cta, chosen->index, -1, 0, m->executed);
    Cta *cta = chosen->cta;
    if (!cta->warps_left && !cta->done && !m->fatal) {
      finish_cta(m, cta);
      live--;
      if (next < m->ctas) start_cta(m, cta, next++), live++;
    }
  }
  return m->finding_count;
}

/* Allocate the CTAs, run, and free. Returns the number of findings, or -1 where memory is short. */
i32 run_machine(Machine *m, i32 resident) {
  i32 warps = m->threads / 32, granules = (m->shared_bytes >> m->granule_shift) + 1;
  if (resident > m->ctas) resident = m->ctas;
  m->random = m->seed * 0x9e3779b97f4a7c15ull + 0x1234567;
  if (!m->random) m->random = 1;
  Cta *ctas = calloc(resident, sizeof *ctas);
  for (i32 n = 0; n < resident; n++) {
    Cta *c = &ctas[n];
    c->machine = m;
    c->shared = malloc(m->shared_bytes + 16);
    c->written = malloc(4 * granules), c->written_pc = malloc(4 * granules);
    c->read = malloc(4 * granules), c->read_pc = malloc(4 * granules);
    c->mbarriers = calloc(m->shared_bytes / 8 + 1, sizeof(Mbarrier));
    c->warps = calloc(warps, sizeof(Warp));
    if (m->uses_tmem) {
      u64 cells = (u64)TMEM_LANES * TMEM_COLUMNS;
      c->tmem = malloc(4 * cells);
      c->tmem_written = calloc(cells, 4), c->tmem_written_pc = calloc(cells, 4);
      c->tmem_read = calloc(cells, 4), c->tmem_read_pc = calloc(cells, 4);
    }
    for (i32 k = 0; k < warps; k++) {
      c->warps[k].registers = aligned_alloc(64, (u64)m->slots * 128 + 128);
      c->warps[k].predicates = malloc(4 * m->predicate_slots + 4);
      c->warps[k].wgmma_stamp = malloc(4 * m->slots + 4);
      c->warps[k].tc5_loading = malloc(4 * m->slots + 4);
      c->warps[k].counts = m->counts ? m->counts + (u64)k * m->code_count : 0;
    }
  }
  schedule(m, ctas, resident);
  for (i32 n = 0; n < resident; n++) {
    Cta *c = &ctas[n];
    for (Async *op = c->pending, *after; op; op = after) after = op->next, free(op);
    for (i32 k = 0; k < c->reader_sets_used; k++) free(c->reader_sets[k].epochs);
    free(c->reader_sets), free(c->free_reader_sets);
    for (i32 k = 0; k < warps; k++) free(c->warps[k].registers), free(c->warps[k].predicates), free(c->warps[k].wgmma_stamp), free(c->warps[k].tc5_loading);
    free(c->shared), free(c->written), free(c->written_pc), free(c->read), free(c->read_pc), free(c->mbarriers), free(c->warps);
    free(c->tmem), free(c->tmem_written), free(c->tmem_written_pc), free(c->tmem_read), free(c->tmem_read_pc);
    while (c->free_knowledge) {
      Knowledge *k = c->free_knowledge;
      c->free_knowledge = k->next_free;
      free(k);
    }
  }
  free(ctas);
  return m->finding_count;
}

i32 machine_bytes(void) { return sizeof(Machine); }
