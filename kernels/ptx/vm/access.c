/* Loads, stores, atomics and matrix moves of the generic proxy. */

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
      if (i->mod >> 7 & 1)
        slot64(w, d[n])[l] = value;
      else
        slot(w, d[n])[l] = (u32)value;
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
/* Parameters are the same for all lanes. imm the offset, mod log2 of the bytes, sign extension << 5 and whole b64
   registers
   << 7, list the n registers. */
static void op_LD_PARAM(Warp *w, const Insn *i, u32 mask) {
  Machine *m = w->cta->machine;
  i32 bytes = 1 << (i->mod & 7);
  for (i32 n = 0; n < i->n; n++) {
    u64 value = 0;
    memcpy(&value, m->params + i->imm + n * bytes, bytes);
    if (i->mod >> 5 & 1) value = (u64)((i64)(value << (64 - 8 * bytes)) >> (64 - 8 * bytes));
    i32 to = m->lists[i->list + n];
    if (i->mod >> 7 & 1) {
      u64 *d = slot64(w, to);
      WRITE(u64, d, value);
    } else {
      u32 *d = slot(w, to);
      WRITE(u32, d, value);
    }
  }
}
enum {
  ATOM_ADD_U32,
  ATOM_ADD_F32,
  ATOM_EXCH,
  ATOM_MIN_U,
  ATOM_MAX_U,
  ATOM_AND,
  ATOM_OR,
  ATOM_CAS,
  ATOM_ADD_U64,
  ATOM_MIN_S,
  ATOM_MAX_S,
  ATOM_XOR
};
/* mod: space, has a result << 2, a 64-bit address << 6; target the operation; s1 the value, list the n values of a
 * vector. */
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
  if (mask != FULL) find(m, FIND_CONVERGENCE, -1, w->pc, w->cta, w->index, -1, SPACE_LANES, ~mask);
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
  if (mask != FULL) find(m, FIND_CONVERGENCE, -1, w->pc, w->cta, w->index, -1, SPACE_LANES, ~mask);
  for (i32 j = 0; j < i->n; j++) {
    u16 rows[8][8];
    const u32 *d = slot(w, m->lists[i->list + j]);
    LANES for (u32 h = 0; h < 2; h++) {
      u32 r = l / 4, c = 2 * (l % 4) + h;
      if (i->mod & 1)
        rows[c][r] = d[l] >> 16 * h;
      else
        rows[r][c] = d[l] >> 16 * h;
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
