/* Tensor memory and the tcgen05 instructions of one CTA (cta_group::1).

   Tensor memory is 128 lanes of 512 columns of 32 bits; an address is lane << 16 | column. MMAs run on one pipe in the
   order in which they were issued, and land late like every asynchronous operation. Loads and stores are done at once,
   but count as done only at the tcgen05.wait for their kind. */

#define TMEM_LANES 128
#define TMEM_COLUMNS 512

static u64 tmem_at(u32 lane, u32 column) { return (u64)lane * TMEM_COLUMNS + column; }

/* One 32-bit cell, or NULL: it has to be allocated. */
static u32 *tmem_cell(Machine *m, const Actor *a, u32 lane, u32 column, i32 write) {
  Cta *c = a->cta;
  u32 address = lane << 16 | column;
  if (lane >= TMEM_LANES || column >= TMEM_COLUMNS) {
    fatal(m, FIND_BOUNDS, -1, a->pc, c, a->warp, a->lane, SPACE_TENSOR, address);
    return 0;
  }
  if (!c->tmem_allocated[column]) find(m, FIND_TMEM, -1, a->pc, c, a->warp, a->lane, SPACE_TENSOR, address);
  u64 at = tmem_at(lane, column);
  if (m->detect && write)
    shadow_write(m, a, c->tmem_written, c->tmem_written_pc, c->tmem_read, c->tmem_read_pc, at, at, SPACE_TENSOR,
                 address, ACCESS_WRITE);
  else if (m->detect)
    shadow_read(m, a, c->tmem_written, c->tmem_written_pc, c->tmem_read, c->tmem_read_pc, at, at, SPACE_TENSOR,
                address);
  (write ? m->bytes_written : m->bytes_read)[SPACE_TENSOR] += 4;
  return c->tmem + at;
}

/* --- allocation --------------------------------------------------------------------------------------------------- */

/* s0 where the address goes, s1 the columns. Waits until there is room. */
static i32 op_TC5_ALLOC(Warp *w, const Insn *i, u32 mask) {
  Cta *cta = w->cta;
  Machine *m = cta->machine;
  u32 lane = __builtin_ctz(mask), columns = slot(w, i->s1)[lane];
  if (columns < 32 || columns > 512 || columns & (columns - 1) || cta->tmem_permit) {
    fatal(m, FIND_TMEM, -1, w->pc, cta, w->index, -1, SPACE_VALUE, columns);
    return 1;
  }
  u32 start = 0;
  for (; start < TMEM_COLUMNS; start += columns) {
    u32 taken = 0;
    for (u32 c = 0; c < columns; c++) taken |= cta->tmem_allocated[start + c];
    if (!taken) break;
  }
  if (start == TMEM_COLUMNS) {
    w->wait = WAIT_ALLOC, w->wait_pc = w->pc;
    return 0;
  }
  for (u32 c = 0; c < columns; c++) cta->tmem_allocated[start + c] = columns;
  for (u32 l = 0; l < TMEM_LANES; l++) {
    memset(cta->tmem_written + tmem_at(l, start), 0, 4 * columns);
    memset(cta->tmem_read + tmem_at(l, start), 0, 4 * columns);
    memset(cta->tmem + tmem_at(l, start), 0xff, 4 * columns);
  }
  cta->tmem_live += columns;
  Actor a = lane_actor(w, lane, w->pc);
  u32 address = shared_offset(i->mod & 1 ? slot64(w, i->s0)[lane] : slot(w, i->s0)[lane]) + i->imm;
  u8 *to = shared_at(m, &a, address, 4, 4, 1);
  if (to) memcpy(to, &start, 4);
  return 1;
}
static void op_TC5_DEALLOC(Warp *w, const Insn *i, u32 mask) {
  Cta *cta = w->cta;
  u32 lane = __builtin_ctz(mask), start = slot(w, i->s0)[lane] & 0xffff, columns = slot(w, i->s1)[lane];
  if (start >= TMEM_COLUMNS || start + columns > TMEM_COLUMNS || cta->tmem_allocated[start] != columns) {
    fatal(cta->machine, FIND_TMEM, -1, w->pc, cta, w->index, -1, SPACE_TENSOR, start);
    return;
  }
  for (Async *op = cta->pending; op; op = op->next)
    if (op->kind == ASYNC_TC5_MMA && op->d_address % 65536 >= start && op->d_address % 65536 < start + columns)
      find(cta->machine, FIND_TMEM, op->pc, w->pc, cta, w->index, -1, SPACE_TENSOR, start);
  for (u32 c = 0; c < columns; c++) cta->tmem_allocated[start + c] = 0;
  cta->tmem_live -= columns;
  wake(cta, WAIT_ALLOC, 0);
}
static void op_TC5_RELINQUISH(Warp *w, const Insn *i, u32 mask) {
  (void)i, (void)mask;
  w->cta->tmem_permit = 1;
}

/* --- loads and stores --------------------------------------------------------------------------------------------- */

enum { TC5_32X32B, TC5_16X256B, TC5_16X128B };

/* The cell that register r of lane l is, relative to the address. */
static void tc5_cell(i32 shape, i32 r, i32 l, u32 *lane, u32 *column) {
  switch (shape) {
    case TC5_32X32B: *lane = l, *column = r; break;
    case TC5_16X256B: *lane = l / 4 + 8 * (r >> 1 & 1), *column = 8 * (r / 4) + 2 * (l % 4) + (r & 1); break;
    case TC5_16X128B: *lane = l / 4 + 8 * (r & 1), *column = 4 * (r / 2) + l % 4; break;
  }
}

/* Loads and stores of a warp are two agents: nothing orders one instruction after another but tcgen05.wait. */
static Actor tc5_actor(Warp *w, i32 store) {
  if (!w->tmem_agent[store]) w->tmem_agent[store] = new_agent(w->cta);
  w->tmem_clock[store] = next_clock(w->cta->machine, w->tmem_clock[store]);
  Actor a = lane_actor(w, 0, w->pc);
  a.lanes = FULL;
  a.epoch = EPOCH(w->tmem_agent[store], w->tmem_clock[store]);
  return a;
}

/* s0 the address, list the registers; mod the shape. A warp reaches only its own quarter of the lanes. */
static void tc5_move(Warp *w, const Insn *i, i32 store) {
  Machine *m = w->cta->machine;
  u32 address = slot(w, i->s0)[0] + i->imm, base_lane = address >> 16, base_column = address & 0xffff;
  u32 quarter = 32 * (w->index & 3);
  Actor a = tc5_actor(w, store);
  if ((base_lane & ~16u) != quarter) {
    find(m, FIND_TMEM, -1, w->pc, w->cta, w->index, -1, SPACE_TENSOR, address);
    base_lane = quarter | (base_lane & 16);
  }
  if (i->mod == TC5_32X32B && base_lane & 16)
    find(m, FIND_ALIGN, -1, w->pc, w->cta, w->index, -1, SPACE_TENSOR, address);
  for (i32 r = 0; r < i->n; r++) {
    u32 *d = slot(w, m->lists[i->list + r]);
    LANES {
      u32 lane = 0, column = 0;
      tc5_cell(i->mod, r, l, &lane, &column);
      u32 *cell = tmem_cell(m, &a, base_lane + lane, base_column + column, store);
      if (!cell) return;
      if (store)
        *cell = d[l];
      else
        d[l] = *cell;
    }
    if (!store) w->tc5_loading[m->lists[i->list + r]] = w->pc + 1;
  }
  if (!store) w->tc5_loads++;
}
static void op_TC5_LD(Warp *w, const Insn *i, u32 mask) {
  (void)mask;
  tc5_move(w, i, 0);
}
static void op_TC5_ST(Warp *w, const Insn *i, u32 mask) {
  (void)mask;
  tc5_move(w, i, 1);
}
/* tcgen05.wait::ld and ::st: what was loaded or stored has happened. */
static void op_TC5_WAIT(Warp *w, const Insn *i, u32 mask) {
  Cta *cta = w->cta;
  if (!i->mod && w->tc5_loads) {
    memset(w->tc5_loading, 0, (u64)cta->machine->slots * 4);
    w->tc5_loads = 0;
  }
  if (!cta->machine->detect || !w->tmem_agent[i->mod]) return;
  Knowledge *k = empty_knowledge(cta);
  k->ordered[w->tmem_agent[i->mod]] = w->tmem_clock[i->mod];
  acquire(w, mask, k);
  drop(cta, k);
}
/* An instruction that reads registers which tcgen05.ld has not been waited for. */
static void check_loaded_registers(Warp *w, const i32 *touches) {
  i32 writes = *touches++;
  for (i32 n = 0; n < touches[writes]; n++) {
    u32 pc = w->tc5_loading[touches[writes + 1 + n]];
    if (!pc) continue;
    find(w->cta->machine, FIND_TMEM, pc - 1, w->pc, w->cta, w->index, -1, SPACE_REGISTER, touches[writes + 1 + n]);
    for (i32 s = 0; s < w->cta->machine->slots; s++) /* once for each load */
      if (w->tc5_loading[s] == pc) w->tc5_loading[s] = 0;
  }
  for (i32 n = 0; n < writes; n++) w->tc5_loading[touches[n]] = 0;
}

/* --- MMA ---------------------------------------------------------------------------------------------------------- */

static u32 tc5_agent(Cta *cta) {
  if (!cta->tc5_agent) cta->tc5_agent = new_agent(cta), cta->tc5_clock = 1;
  return cta->tc5_agent;
}

enum { TC5_A_TMEM = 1, TC5_HAS_LANE_MASK = 2 };

/* s0 the address of D, s1 A (a descriptor, or an address), s2 the B descriptor, s3 the instruction descriptor, d0 the
   predicate that adds to D; list the lanes that are not written. */
static void op_TC5_MMA(Warp *w, const Insn *i, u32 mask) {
  Machine *m = w->cta->machine;
  LANES if (mask >> l & 1) {
    Async *op = new_async(w, ASYNC_TC5_MMA, 1u << l);
    op->agent = tc5_agent(w->cta);
    op->clock = w->cta->tc5_clock;
    op->d_address = slot(w, i->s0)[l] + i->imm;
    op->a_desc = i->mod & TC5_A_TMEM ? slot(w, i->s1)[l] + (u32)i->imm2 : slot64(w, i->s1)[l];
    op->b_desc = slot64(w, i->s2)[l];
    op->idesc = slot(w, i->s3)[l];
    op->scale_d = predicate(w, i->target) >> l & 1;
    for (i32 n = 0; n < 4; n++) op->registers[n] = i->mod & TC5_HAS_LANE_MASK ? slot(w, m->lists[i->list + n])[l] : 0;
    push(w->cta, op);
  }
}

static i32 tc5_descriptor(Machine *m, Cta *cta, Async *op, u64 d, i32 mn_major, Descriptor *out) {
  static const i32 swizzle[8] = {0, -1, 128, -1, 64, -1, 32, -1};
  i32 bytes = swizzle[d >> 61];
  if (bytes < 0 || (d >> 46 & 7) != 1 || (d >> 49 & 15)) { /* 32-byte atoms, base offsets and the second LBO mode */
    fatal(m, FIND_DESCRIPTOR, -1, op->pc, cta, op->warp, -1, SPACE_VALUE, d);
    return 0;
  }
  *out = (Descriptor){(d & 0x3fff) << 4, (d >> 16 & 0x3fff) << 4, (d >> 32 & 0x3fff) << 4, bytes, mn_major};
  return 1;
}

/* The lane that holds row r of a matrix of `rows` rows: 64 rows take 16 lanes of each quarter, from lane 0 or 16 on. */
static u32 tc5_lane(u32 rows, u32 address, u32 r) {
  return (address >> 16) + (rows == 64 ? 32 * (r / 16) + r % 16 : r);
}

static i32 tc5_lanes_fit(u32 rows, u32 address) { return !(address >> 16) || (rows == 64 && address >> 16 == 16); }

static void land_tc5_mma(Cta *cta, Async *op) {
  float a[128][16], c[MAX_COLUMNS];
  Columns b;
  Machine *m = cta->machine;
  const Insn *i = &m->code[op->pc];
  u32 idesc = op->idesc, rows = (idesc >> 24 & 31) << 4, columns = (idesc >> 17 & 63) << 3;
  u32 a_format = idesc >> 7 & 7, b_format = idesc >> 10 & 7;
  if ((idesc & 0xf) || (idesc >> 4 & 3) != 1 || a_format > 1 || b_format > 1 || (rows != 64 && rows != 128) ||
      columns < 8 || columns > 256 || (rows == 128 && columns % 16) || idesc >> 30) {
    fatal(m, FIND_DESCRIPTOR, -1, op->pc, cta, op->warp, -1, SPACE_VALUE, idesc);
    return;
  }
  u32 a_address = i->mod & TC5_A_TMEM ? (u32)op->a_desc : 0;
  if (!tc5_lanes_fit(rows, op->d_address) || !tc5_lanes_fit(rows, a_address)) {
    fatal(m, FIND_TMEM, -1, op->pc, cta, op->warp, -1, SPACE_TENSOR, op->d_address);
    return;
  }
  Actor actor = async_actor(cta, op, op->mask), inside = actor;
  inside.async = 0; /* tensor memory has no proxies */
  inside.pipe = op->agent;
  Descriptor d;
  if (i->mod & TC5_A_TMEM) { /* two elements in a column */
    for (u32 r = 0; r < rows; r++)
      for (u32 k = 0; k < 16; k += 2) {
        u32 *cell = tmem_cell(m, &inside, tc5_lane(rows, a_address, r), (a_address & 0xffff) + k / 2, 0);
        if (!cell) return;
        a[r][k] = half_value(*cell & 0xffff, !a_format), a[r][k + 1] = half_value(*cell >> 16, !a_format);
      }
  } else {
    if (!tc5_descriptor(m, cta, op, op->a_desc, idesc >> 15 & 1, &d)) return;
    if (!read_operand(cta, &actor, &d, 0, rows, !a_format, &a[0][0], 16, 1)) return;
  }
  if (!tc5_descriptor(m, cta, op, op->b_desc, idesc >> 16 & 1, &d)) return;
  if (!read_operand(cta, &actor, &d, 0, columns, !b_format, &b.value[0][0], 1, MAX_COLUMNS)) return;
  find_exponents(&b, columns);
  i32 negate = (idesc >> 13 & 1) ^ (idesc >> 14 & 1);
  for (u32 r = 0; r < rows; r++) {
    u32 lane = tc5_lane(rows, op->d_address, r);
    if (op->registers[lane / 32] >> lane % 32 & 1) continue;
    if (negate)
      for (u32 k = 0; k < 16; k++) a[r][k] = -a[r][k];
    for (u32 n = 0; n < columns; n++) {
      u32 *cell = op->scale_d ? tmem_cell(m, &inside, lane, (op->d_address & 0xffff) + n, 0) : 0;
      if (m->fatal) return;
      c[n] = cell ? as_float(*cell) : 0.0f;
    }
    dot16(c, a[r], &b, columns);
    for (u32 n = 0; n < columns; n++) {
      u32 *cell = tmem_cell(m, &inside, lane, (op->d_address & 0xffff) + n, 1);
      if (!cell) return;
      *cell = as_bits(c[n]);
    }
  }
  m->macs += (u64)rows * columns * 16;
}

/* The mbarrier is arrived at when all MMAs before have landed. */
static void op_TC5_COMMIT(Warp *w, const Insn *i, u32 mask) {
  LANES if (mask >> l & 1) {
    Async *op = new_async(w, ASYNC_TC5_COMMIT, 1u << l);
    op->mbarrier = shared_offset(i->mod & 1 ? slot64(w, i->s0)[l] : slot(w, i->s0)[l]) + i->imm;
    op->agent = tc5_agent(w->cta);
    op->clock = w->cta->tc5_clock;
    w->cta->tc5_clock = next_clock(w->cta->machine, w->cta->tc5_clock);
    push(w->cta, op);
  }
}
static void land_tc5_commit(Cta *cta, Async *op) {
  Mbarrier *b = mbarrier_at(cta, op->mbarrier, op->warp, -1, op->pc, 1);
  if (!b) return;
  Actor a = async_actor(cta, op, op->mask);
  check_init(cta->machine, &a, b, op->mbarrier);
  complete_into(cta, op, op->mask, &b->released);
  mbarrier_arrive(cta, b, op->mbarrier, 1, op->pc, op->warp, -1);
}
