/* Asynchronous operations: issued by an instruction, landed later by the scheduler, in any order that the ISA allows.
   Reads and writes of memory happen when an operation lands. */

static Async *new_async(Warp *w, i32 kind, u32 mask) {
  Cta *cta = w->cta;
  Async *op = calloc(1, sizeof *op);
  op->kind = kind;
  op->warp = w->index;
  op->pc = w->pc;
  op->mask = mask;
  op->sequence = cta->machine->sequence++;
  op->knowledge = keep(w->knowledge[__builtin_ctz(mask)]);
  memcpy(op->clocks, w->clock, sizeof op->clocks);
  memcpy(op->fenced_clocks, w->fenced_clock, sizeof op->fenced_clocks);
  cta->machine->progress++;
  return op;
}

static void push(Cta *cta, Async *op) {
  if (cta->pending_tail)
    cta->pending_tail->next = op;
  else
    cta->pending = op;
  cta->pending_tail = op;
}

/* What an operation knows and did, joined into *into: its completion. */
static void complete_into(Cta *cta, Async *op, u32 lanes, Knowledge **into) {
  if (!cta->machine->detect) return;
  if (!*into) *into = empty_knowledge(cta);
  Knowledge *k = own(cta, into);
  join_vectors(cta, k, op->knowledge);
  LANES if (lanes >> l & 1) {
    i32 agent = 1 + op->warp * 32 + l;
    k->ordered[agent] = MAX(k->ordered[agent], op->clocks[l]);
    k->fenced[agent] = MAX(k->fenced[agent], op->fenced_clocks[l]);
  }
  if (op->agent) k->ordered[op->agent] = MAX(k->ordered[op->agent], op->clock);
}

static void complete_tx(Cta *cta, Async *op, u32 address, u64 bytes) {
  Mbarrier *b = mbarrier_at(cta, address, op->warp, -1, op->pc, 1);
  if (!b) return;
  Actor a = async_actor(cta, op, op->mask);
  check_init(cta->machine, &a, b, address);
  complete_into(cta, op, op->mask, &b->released);
  b->tx -= bytes;
  if (!transfer_fits(cta, b, address, op->pc, op->warp, -1)) return;
  complete_phase_if_due(cta, b, address);
}

/* --- cp.async ----------------------------------------------------------------------------------------------------- */

/* s0 destination, s1 source, imm bytes, s2 the source bytes (else imm). Each lane's copies are one agent, in the
   generic proxy. */
static void op_CP_ASYNC(Warp *w, const Insn *i, u32 mask) {
  Async *op = new_async(w, ASYNC_CP, mask);
  LANES if (mask >> l & 1) {
    op->destination[l] = shared_offset(i->mod & 1 ? slot64(w, i->s0)[l] : slot(w, i->s0)[l]) + i->imm2;
    op->source[l] = slot64(w, i->s1)[l] + i->n;
    op->bytes[l] = i->mod & 2 ? slot(w, i->s2)[l] : (u32)i->imm;
    if (!w->cp_agent[l]) w->cp_agent[l] = new_agent(w->cta), w->cp_clock[l] = 1;
    op->registers[l] = w->cp_agent[l];
    op->registers[32 + l] = w->cp_clock[l];
    op->registers[64 + l] = w->cp_group[l];
  }
  op->idesc = i->imm;
  push(w->cta, op);
}
static void land_cp_async(Cta *cta, Async *op) {
  Machine *m = cta->machine;
  LANES if (op->mask >> l & 1) {
    Actor a = async_actor(cta, op, 1u << l);
    a.async = 0; /* the generic proxy */
    a.epoch = EPOCH(op->registers[l], op->registers[32 + l]);
    u8 *to = shared_at(m, &a, op->destination[l], op->idesc, op->idesc, 1);
    if (!to) return;
    memset(to, 0, op->idesc);
    if (op->bytes[l] > op->idesc) {
      fatal(m, FIND_BOUNDS, -1, op->pc, cta, op->warp, l, SPACE_VALUE, op->bytes[l]);
      return;
    }
    if (!op->bytes[l]) continue;
    u8 *from = global_at(m, &a, op->source[l], op->bytes[l], op->idesc, ACCESS_READ);
    if (!from) return;
    memcpy(to, from, op->bytes[l]);
  }
}
/* Once all earlier cp.async of a lane have landed, it arrives. */
static void op_CP_ASYNC_MBAR_ARRIVE(Warp *w, const Insn *i, u32 mask) {
  Async *op = new_async(w, ASYNC_CP_ARRIVE, mask);
  LANES if (mask >> l & 1) {
    op->destination[l] = shared_offset(i->mod & 1 ? slot64(w, i->s0)[l] : slot(w, i->s0)[l]) + i->imm;
    Mbarrier *b = mbarrier_at(w->cta, op->destination[l], w->index, l, w->pc, 1);
    if (!b) return;
    if (!(i->mod & 2) && ++b->pending > MOST_PENDING) { /* without .noinc */
      fatal(w->cta->machine, FIND_MBARRIER, b->init_pc, w->pc, w->cta, w->index, l, SPACE_SHARED, op->destination[l]);
      return;
    }
    op->registers[l] = w->cp_agent[l];
    op->registers[32 + l] = w->cp_clock[l];
    if (w->cp_agent[l]) w->cp_clock[l]++;
  }
  push(w->cta, op);
}
static void land_cp_arrive(Cta *cta, Async *op) {
  LANES if (op->mask >> l & 1) {
    Mbarrier *b = mbarrier_at(cta, op->destination[l], op->warp, l, op->pc, 1);
    if (!b || cta->machine->fatal) return;
    Actor a = async_actor(cta, op, 1u << l);
    a.async = 0;
    check_init(cta->machine, &a, b, op->destination[l]);
    op->agent = op->registers[l];
    op->clock = op->registers[32 + l];
    complete_into(cta, op, 1u << l, &b->released);
    mbarrier_arrive(cta, b, op->destination[l], 1, op->pc, op->warp, l);
  }
}
static void op_CP_ASYNC_COMMIT(Warp *w, const Insn *i, u32 mask) {
  (void)i;
  LANES if (mask >> l & 1) {
    w->cp_commit_clock[l][w->cp_group[l]++ % 16] = w->cp_clock[l];
    if (w->cp_agent[l]) w->cp_clock[l] = next_clock(w->cta->machine, w->cp_clock[l]);
  }
}
/* Whether at most `most` of the newest groups of these lanes are pending. */
static i32 groups_left(Cta *cta, i32 kind, Warp *w, u32 mask, const u32 *groups, i32 most, i32 offset) {
  for (Async *op = cta->pending; op; op = op->next) {
    if (op->kind != kind || op->warp != w->index) continue;
    LANES if ((mask & op->mask) >> l & 1) if ((i32)(groups[l] - op->registers[offset + l]) > most) return 1;
  }
  return 0;
}
static i32 op_CP_ASYNC_WAIT(Warp *w, const Insn *i, u32 mask) {
  if (groups_left(w->cta, ASYNC_CP, w, mask, w->cp_group, i->imm, 64)) {
    w->wait = WAIT_GROUP, w->wait_pc = w->pc;
    return 0;
  }
  if (!w->cta->machine->detect) return 1;
  LANES if ((mask >> l & 1) && w->cp_agent[l]) {
    Knowledge *k = empty_knowledge(w->cta);
    u32 done = w->cp_group[l] - (u32)MAX(i->imm, 0); /* groups */
    if (i->imm < 0)
      k->ordered[w->cp_agent[l]] = w->cp_clock[l]++;
    else if ((i32)done > 0 && i->imm < 16) /* of older groups nothing is kept */
      k->ordered[w->cp_agent[l]] = w->cp_commit_clock[l][(done - 1) % 16];
    acquire(w, 1u << l, k);
    drop(w->cta, k);
  }
  return 1;
}

/* --- tensor maps -------------------------------------------------------------------------------------------------- */

/* What stands in for a 128-byte CUtensorMap: the same facts, in the clear. Extents and strides innermost first. */
typedef struct {
  u64 magic, base;
  u32 element_bytes, rank, extent[5];
  u32 box[5];
  u64 stride[4]; /* bytes, of dimensions 1 and up */
  u32 swizzle_bytes, pad;
} TensorMap;
#define TENSOR_MAP_MAGIC 0x50414d524f534e54ull
#define PARAM_WINDOW 0x0600000000000000ull

/* Address bits that the hardware exchanges: 16-byte chunk ^= line, within 128, 64 or 32 bytes. */
static inline u32 swizzled(u32 address, u32 swizzle_bytes) {
  u32 chunks = swizzle_bytes / 16;
  return chunks > 1 ? address ^ ((address >> 7 & (chunks - 1)) << 4) : address;
}

static TensorMap *map_at(Machine *m, Cta *cta, Async *op) {
  u64 offset = op->map - PARAM_WINDOW;
  TensorMap *t = (TensorMap *)(m->params + offset);
  if (op->map < PARAM_WINDOW || offset + 128 > (u64)m->param_bytes || t->magic != TENSOR_MAP_MAGIC) {
    fatal(m, FIND_TENSOR_MAP, -1, op->pc, cta, op->warp, -1, SPACE_GENERIC, op->map);
    return 0;
  }
  return t;
}

enum { TMA_TILE, TMA_GATHER4 };
enum { REDUCE_NONE, REDUCE_ADD_F32, REDUCE_ADD_BF16, REDUCE_ADD_U32 };

/* One fp32 atomic add: in global memory it flushes subnormals, in shared memory it does not. */
static u32 atomic_add(u32 x, u32 y, i32 flushes) {
  u32 r = flushes ? flush(as_bits(as_float(flush(x)) + as_float(flush(y)))) : as_bits(as_float(x) + as_float(y));
  return (r & 0x7fffffff) > 0x7f800000 ? CANONICAL_NAN : r;
}

static void reduce_add(u8 *to, const u8 *from, u32 bytes, i32 kind) {
  for (u32 b = 0; b < bytes; b += kind == REDUCE_ADD_BF16 ? 2 : 4) {
    if (kind == REDUCE_ADD_F32) {
      u32 x, y;
      memcpy(&x, to + b, 4), memcpy(&y, from + b, 4);
      u32 r = atomic_add(x, y, 0); /* subnormals are kept, unlike by red.global (measured on an H200) */
      memcpy(to + b, &r, 4);
    } else if (kind == REDUCE_ADD_U32) {
      u32 x, y;
      memcpy(&x, to + b, 4), memcpy(&y, from + b, 4);
      x += y;
      memcpy(to + b, &x, 4);
    } else {
      u16 x, y;
      memcpy(&x, to + b, 2), memcpy(&y, from + b, 2);
      x = bf16_of(as_bits(as_float((u32)x << 16) + as_float((u32)y << 16)));
      memcpy(to + b, &x, 2);
    }
  }
}

/* One box, run by run along its innermost dimension. Loads fill with zeros what lies outside; stores leave it out. */
static void land_tma(Cta *cta, Async *op, i32 load) {
  Machine *m = cta->machine;
  TensorMap *t = map_at(m, cta, op);
  if (!t) return;
  u32 rank = t->rank, row_bytes = t->box[0] * t->element_bytes;
  u32 rows = op->group == TMA_GATHER4 ? 4 : 1;
  if (op->group != TMA_GATHER4)
    for (u32 d = 1; d < rank; d++) rows *= t->box[d];
  if (m->code[op->pc].n != (op->group == TMA_GATHER4 ? 5 : (i32)rank) || (op->group == TMA_GATHER4 && rank != 2)) {
    fatal(m, FIND_TENSOR_MAP, -1, op->pc, cta, op->warp, -1, SPACE_GENERIC, op->map); /* of another rank */
    return;
  }
  Actor a = async_actor(cta, op, op->mask);
  if (op->scale_d && t->element_bytes != 4) { /* a map does not say its type: sums are those of fp32 */
    fatal(m, FIND_TENSOR_MAP, -1, op->pc, cta, op->warp, -1, SPACE_GENERIC, op->map);
    return;
  }
  if (op->destination[0] & 127 || (t->swizzle_bytes && row_bytes > t->swizzle_bytes)) {
    fatal(m, FIND_ALIGN, -1, op->pc, cta, op->warp, -1, SPACE_SHARED, op->destination[0]);
    return;
  }
  u64 pitches = t->base | row_bytes;
  for (u32 d = 1; d < rank; d++) pitches |= t->stride[d - 1];
  if (pitches & 15) { /* cuTensorMapEncodeTiled refuses it */
    fatal(m, FIND_TENSOR_MAP, -1, op->pc, cta, op->warp, -1, SPACE_GENERIC, op->map);
    return;
  }
  if ((i64)op->coordinates[0] * t->element_bytes & 15) { /* an illegal instruction on an H200 */
    fatal(m, FIND_ALIGN, -1, op->pc, cta, op->warp, -1, SPACE_VALUE, (u64)(i64)op->coordinates[0]);
    return;
  }
  u64 row_end = (u64)t->extent[0] * t->element_bytes;
  i32 crosses = op->coordinates[0] + (i64)t->box[0] > t->extent[0];
  if (!load && (row_end & 15) && crosses) { /* an H200 writes on to the next multiple of 16 bytes */
    fatal(m, FIND_BOUNDS, -1, op->pc, cta, op->warp, -1, SPACE_GLOBAL, t->base + row_end);
    return;
  }
  for (u32 d = 0; d < rank && !load; d++) /* loads fill with zeros there; stores are illegal on an H200 */
    if (op->coordinates[d] < 0) {
      fatal(m, FIND_BOUNDS, -1, op->pc, cta, op->warp, -1, SPACE_VALUE, (u64)(i64)op->coordinates[d]);
      return;
    }
  for (u32 r = 0; r < rows; r++) {
    u64 address = t->base + (i64)op->coordinates[0] * t->element_bytes;
    u32 inside = 1, index = r;
    for (u32 d = 1; d < rank; d++) {
      i32 c;
      if (op->group == TMA_GATHER4) {
        c = op->coordinates[1 + r];
      } else {
        c = op->coordinates[d] + (i32)(index % t->box[d]);
        index /= t->box[d];
      }
      if (c < 0 || (u32)c >= t->extent[d]) inside = 0;
      address += (i64)c * (i64)t->stride[d - 1];
    }
    for (u32 b = 0; b < row_bytes; b += 16) { /* chunks, which a swizzle moves whole */
      u32 chunk = MIN(16u, row_bytes - b);
      u8 *shared = shared_at(m, &a, swizzled(op->destination[0] + r * row_bytes + b, t->swizzle_bytes), chunk, 1, load);
      if (!shared) return;
      for (u32 e = 0; e < chunk; e += t->element_bytes) {
        i64 c = op->coordinates[0] + (i64)((b + e) / t->element_bytes);
        if (!inside || c < 0 || c >= t->extent[0]) {
          if (load) memset(shared + e, 0, t->element_bytes);
          continue;
        }
        i32 access = load ? ACCESS_READ : op->scale_d ? ACCESS_ATOMIC : ACCESS_WRITE;
        u8 *global = global_at(m, &a, address + b + e, t->element_bytes, 1, access);
        if (!global) return;
        if (load)
          memcpy(shared + e, global, t->element_bytes);
        else if (op->scale_d)
          reduce_add(global, shared + e, t->element_bytes, op->scale_d);
        else
          memcpy(global, shared + e, t->element_bytes);
      }
    }
  }
  if (load) complete_tx(cta, op, op->mbarrier, (u64)rows * row_bytes);
}

/* Loads in flight share a ring of agents. */
static void tma_agent(Cta *cta, Async *op) {
  u32 n = cta->tma_next++ % 64;
  if (!cta->tma_agents[n]) cta->tma_agents[n] = new_agent(cta);
  op->agent = cta->tma_agents[n];
  op->clock = cta->tma_clocks[n] = next_clock(cta->machine, cta->tma_clocks[n]);
}
/* Stores and bulk copies out of shared memory are one agent a lane; its clock moves on with each group. */
static void bulk_agent(Warp *w, u32 lane, Async *op) {
  if (!w->bulk_agent[lane]) w->bulk_agent[lane] = new_agent(w->cta), w->bulk_clock[lane] = 1;
  op->agent = w->bulk_agent[lane];
  op->clock = w->bulk_clock[lane];
  op->registers[64 + lane] = w->bulk_group[lane];
}

/* s0 shared address, s1 map, s2 mbarrier, list coordinates; mod: 1 a 64-bit shared address, 2 gather4, 4 a 64-bit
   mbarrier address; n coordinates; imm, imm2 offsets. */
static void op_TMA_LOAD(Warp *w, const Insn *i, u32 mask) {
  LANES if (mask >> l & 1) {
    Async *op = new_async(w, ASYNC_TMA_LOAD, 1u << l);
    op->destination[0] = shared_offset(i->mod & 1 ? slot64(w, i->s0)[l] : slot(w, i->s0)[l]) + i->imm;
    op->map = slot64(w, i->s1)[l];
    op->mbarrier = shared_offset(i->mod & 4 ? slot64(w, i->s2)[l] : slot(w, i->s2)[l]) + i->imm2;
    op->group = i->mod & 2 ? TMA_GATHER4 : TMA_TILE;
    for (i32 c = 0; c < i->n; c++) op->coordinates[c] = slot(w, w->cta->machine->lists[i->list + c])[l];
    tma_agent(w->cta, op);
    push(w->cta, op);
  }
}
/* s0 shared address, s1 map; target is the reduction. Lanes that issue the same store without a reduction issue one: a
   whole warp may run through a store that is meant once. */
static i32 same_store(Warp *w, const Insn *i, u32 a, u32 b) {
  i32 same = slot64(w, i->s1)[a] == slot64(w, i->s1)[b];
  same &= i->mod & 1 ? slot64(w, i->s0)[a] == slot64(w, i->s0)[b] : slot(w, i->s0)[a] == slot(w, i->s0)[b];
  for (i32 c = 0; c < i->n; c++) {
    const u32 *at = slot(w, w->cta->machine->lists[i->list + c]);
    same &= at[a] == at[b];
  }
  return same && !i->target;
}
static void op_TMA_STORE(Warp *w, const Insn *i, u32 mask) {
  u32 issued = 0;
  LANES if (mask >> l & 1) {
    u32 duplicate = 0;
    for (u32 e = 0; e < (u32)l; e++) duplicate |= (issued >> e & 1) && same_store(w, i, e, l);
    if (duplicate) continue;
    issued |= 1u << l;
    Async *op = new_async(w, ASYNC_TMA_STORE, 1u << l);
    op->destination[0] = shared_offset(i->mod & 1 ? slot64(w, i->s0)[l] : slot(w, i->s0)[l]) + i->imm;
    op->map = slot64(w, i->s1)[l];
    op->scale_d = i->target;
    for (i32 c = 0; c < i->n; c++) op->coordinates[c] = slot(w, w->cta->machine->lists[i->list + c])[l];
    bulk_agent(w, l, op);
    push(w->cta, op);
  }
}
/* Shared to global, s0 global, s1 shared, s2 bytes; target is the reduction; mod 1: a 64-bit shared address. */
static void op_BULK_STORE(Warp *w, const Insn *i, u32 mask) {
  LANES if (mask >> l & 1) {
    Async *op = new_async(w, ASYNC_BULK_STORE, 1u << l);
    op->source[0] = slot64(w, i->s0)[l] + i->imm;
    op->destination[0] = shared_offset(i->mod & 1 ? slot64(w, i->s1)[l] : slot(w, i->s1)[l]) + i->imm2;
    op->bytes[0] = slot(w, i->s2)[l];
    op->scale_d = i->target;
    bulk_agent(w, l, op);
    push(w->cta, op);
  }
}
static void land_bulk_store(Cta *cta, Async *op) {
  Actor a = async_actor(cta, op, op->mask);
  u32 bytes = op->bytes[0];
  if (bytes & 15 || !bytes) {
    fatal(cta->machine, FIND_ALIGN, -1, op->pc, cta, op->warp, -1, SPACE_VALUE, bytes);
    return;
  }
  u8 *from = shared_at(cta->machine, &a, op->destination[0], bytes, 16, 0);
  u8 *to = from ? global_at(cta->machine, &a, op->source[0], bytes, 16, op->scale_d ? ACCESS_ATOMIC : ACCESS_WRITE) : 0;
  if (!to) return;
  if (op->scale_d)
    reduce_add(to, from, bytes, op->scale_d);
  else
    memcpy(to, from, bytes);
}
/* Global to shared, s0 shared, s1 global, s2 bytes, s3 mbarrier. */
static void op_BULK_LOAD(Warp *w, const Insn *i, u32 mask) {
  LANES if (mask >> l & 1) {
    Async *op = new_async(w, ASYNC_BULK_LOAD, 1u << l);
    op->destination[0] = shared_offset(i->mod & 1 ? slot64(w, i->s0)[l] : slot(w, i->s0)[l]) + i->imm;
    op->source[0] = slot64(w, i->s1)[l] + i->imm2;
    op->bytes[0] = slot(w, i->s2)[l];
    op->mbarrier = shared_offset(i->mod & 4 ? slot64(w, i->s3)[l] : slot(w, i->s3)[l]) + i->n;
    tma_agent(w->cta, op);
    push(w->cta, op);
  }
}
static void land_bulk_load(Cta *cta, Async *op) {
  Actor a = async_actor(cta, op, op->mask);
  u32 bytes = op->bytes[0];
  if (bytes & 15 || !bytes) {
    fatal(cta->machine, FIND_ALIGN, -1, op->pc, cta, op->warp, -1, SPACE_VALUE, bytes);
    return;
  }
  u8 *from = global_at(cta->machine, &a, op->source[0], bytes, 16, ACCESS_READ);
  u8 *to = from ? shared_at(cta->machine, &a, op->destination[0], bytes, 16, 1) : 0;
  if (!to) return;
  memcpy(to, from, bytes);
  complete_tx(cta, op, op->mbarrier, bytes);
}
static void op_BULK_COMMIT(Warp *w, const Insn *i, u32 mask) {
  (void)i;
  LANES if (mask >> l & 1) {
    w->bulk_group[l]++;
    if (w->bulk_agent[l]) w->bulk_clock[l] = next_clock(w->cta->machine, w->bulk_clock[l]);
  }
}
/* The reads and writes of a bulk copy land at once here, so .read and no .read are one. */
static i32 op_BULK_WAIT(Warp *w, const Insn *i, u32 mask) {
  Cta *cta = w->cta;
  if (groups_left(cta, ASYNC_BULK_STORE, w, mask, w->bulk_group, i->imm, 64) ||
      groups_left(cta, ASYNC_TMA_STORE, w, mask, w->bulk_group, i->imm, 64)) {
    w->wait = WAIT_GROUP, w->wait_pc = w->pc;
    return 0;
  }
  if (!cta->machine->detect) return 1;
  LANES if ((mask >> l & 1) && w->bulk_agent[l] && (i32)w->bulk_clock[l] - 1 > i->imm) {
    Knowledge *k = empty_knowledge(cta);
    k->ordered[w->bulk_agent[l]] = w->bulk_clock[l] - 1 - i->imm;
    acquire(w, 1u << l, k);
    drop(cta, k);
  }
  return 1;
}
