/* wgmma, and the arithmetic of the tensor cores.

   Each warp of a warpgroup computes 16 of the 64 rows, so an instruction is executed warp by warp. */

/* --- arithmetic --------------------------------------------------------------------------------------------------- */

/* d = c + sum of 16 products of bf16 (or fp16) numbers, bit for bit as the tensor cores of an H200 add (wgmma,
   measured): the exponent of a product is the sum of its factors' exponents, not normalised; the 17 terms are aligned
   to the largest exponent and cut, towards zero, ALIGN_BITS below it; they are added exactly, and the sum is cut to
   fp32.

   A row of A at a time, eight columns of B at a time. Numbers are held as fp32, so that products are exact, beside
   their exponents. */
#define ALIGN_BITS 25
#define MAX_COLUMNS 256
#define NO_EXPONENT -4096      /* of zero */
#define SPECIAL_EXPONENT 65536 /* of infinities and NaN: next to any other it stands out */

typedef struct {
  float value[16][MAX_COLUMNS];
  i32 exponent[16][MAX_COLUMNS];
} Columns;

static inline i32 exponent_of(float f) {
  u32 x = as_bits(f) & 0x7fffffff;
  if (x >= 0x7f800000) return SPECIAL_EXPONENT;
  return !x ? NO_EXPONENT : x < 0x00800000 ? -126 : (i32)(x >> 23) - 127;
}
static void find_exponents(Columns *b, i32 columns) {
  for (i32 k = 0; k < 16; k++)
    for (i32 n = 0; n < columns; n++) b->exponent[k][n] = exponent_of(b->value[k][n]);
}
static inline float power_of_two(i32 e) { return as_float((u32)(e + 127) << 23); }

/* One column by itself: where all terms are zero, at the ends of the range, and with infinities and NaN. */
static float dot16_column(float c, const float *a, const Columns *b, i32 n, i32 largest) {
  double plain = c, sum = 0;
  for (i32 k = 0; k < 16; k++) plain += (double)a[k] * (double)b->value[k][n];
  if (plain != plain || __builtin_isinf(plain)) return plain != plain ? as_float(CANONICAL_NAN) : (float)plain;
  if (largest < -1000) return 0.0f;
  double up = ldexp(1.0, ALIGN_BITS - largest), magnitude;
  sum = __builtin_trunc(c * up);
  for (i32 k = 0; k < 16; k++) sum += __builtin_trunc((double)a[k] * (double)b->value[k][n] * up);
  magnitude = __builtin_fabs(ldexp(sum, largest - ALIGN_BITS));
  if (magnitude >= 0x1p128) return sum < 0 ? -__builtin_inff() : __builtin_inff();
  float f = (float)magnitude;
  if ((double)f > magnitude) f = as_float(as_bits(f) - 1);
  return sum < 0 ? -f : f;
}

static void dot16(float *restrict c, const float *restrict a, const Columns *restrict b, i32 columns) {
  i32 ea[16];
  for (i32 k = 0; k < 16; k++) ea[k] = exponent_of(a[k]);
  for (i32 n0 = 0; n0 < columns; n0 += 8) {
    i32 largest[8], sum[8], alone = 0;
    float before[8], up[8], down[8];
    for (i32 n = 0; n < 8; n++) before[n] = c[n0 + n], largest[n] = exponent_of(before[n]);
    for (i32 k = 0; k < 16; k++)
      for (i32 n = 0; n < 8; n++) largest[n] = MAX(largest[n], ea[k] + b->exponent[k][n0 + n]);
    for (i32 n = 0; n < 8; n++) { /* outside these bounds scaled terms would not be exact in fp32 */
      i32 inside = largest[n] >= -90 && largest[n] <= 100, e = inside ? largest[n] : 0;
      alone |= !inside << n;
      up[n] = inside ? power_of_two(ALIGN_BITS - e) : 0.0f;
      down[n] = power_of_two(e - ALIGN_BITS);
      sum[n] = (i32)(inside ? before[n] * up[n] : 0.0f);
    }
    for (i32 k = 0; k < 16; k++)
      for (i32 n = 0; n < 8; n++) sum[n] += (i32)(a[k] * b->value[k][n0 + n] * up[n]);
    for (i32 n = 0; n < 8; n++) { /* to fp32, towards zero */
      u32 magnitude = sum[n] < 0 ? 0u - (u32)sum[n] : (u32)sum[n];
      u32 bits = magnitude ? 32 - __builtin_clz(magnitude) : 0;
      if (bits > 24) magnitude &= ~0u << (bits - 24);
      float f = (float)magnitude * down[n];
      c[n0 + n] = sum[n] < 0 ? -f : f;
    }
    while (alone) {
      i32 n = __builtin_ctz(alone);
      alone &= alone - 1;
      c[n0 + n] = dot16_column(before[n], a, b, n0 + n, largest[n]);
    }
  }
}

/* --- operands in shared memory ------------------------------------------------------------------------------------ */

/* A matrix operand as a descriptor has it. */
typedef struct {
  u32 start, leading, stride, swizzle_bytes;
  i32 mn_major;
} Descriptor;

/* Byte address of element (mn, k) of a 16-bit operand, in the canonical layouts of the ISA. A line of a swizzled layout
   holds swizzle_bytes / 2 elements along the major dimension; 8 lines are an atom. */
static inline u32 element_address(const Descriptor *d, u32 mn, u32 k) {
  u32 line = d->swizzle_bytes / 2, a;
  if (!d->mn_major) {
    if (d->swizzle_bytes)
      a = d->start + (mn >> 3) * d->stride + (mn & 7) * d->swizzle_bytes + k * 2;
    else
      a = d->start + (mn >> 3) * d->stride + (k >> 3) * d->leading + (mn & 7) * 16 + (k & 7) * 2;
  } else if (d->swizzle_bytes) {
    a = d->start + mn / line * d->leading + (k >> 3) * d->stride + (k & 7) * d->swizzle_bytes + mn % line * 2;
  } else {
    a = d->start + (mn >> 3) * d->stride + (k >> 3) * d->leading + (k & 7) * 16 + (mn & 7) * 2;
  }
  return swizzled(a, d->swizzle_bytes);
}

static float half_value(u16 h, i32 is_f16) { return is_f16 ? f16_to_float(h) : as_float((u32)h << 16); }

/* Elements [first, first + count) along mn by 16 along k, as values[mn][k] with this pitch. Read in runs of 8 along the
   major dimension, which no layout splits. */
static i32 read_operand(Cta *cta, const Actor *actor, const Descriptor *d, u32 first, u32 count, i32 is_f16,
                        float *values, u32 mn_pitch, u32 k_pitch) {
  Machine *m = cta->machine;
  if (!d->mn_major) {
    for (u32 mn = 0; mn < count; mn++)
      for (u32 k = 0; k < 16; k += 8) {
        u16 *from = (u16 *)shared_at(m, actor, element_address(d, first + mn, k), 16, 16, 0);
        if (!from) return 0;
        for (u32 e = 0; e < 8; e++) values[mn * mn_pitch + (k + e) * k_pitch] = half_value(from[e], is_f16);
      }
  } else {
    for (u32 k = 0; k < 16; k++)
      for (u32 mn = 0; mn < count; mn += 8) {
        u16 *from = (u16 *)shared_at(m, actor, element_address(d, first + mn, k), 16, 16, 0);
        if (!from) return 0;
        for (u32 e = 0; e < 8; e++) values[(mn + e) * mn_pitch + k * k_pitch] = half_value(from[e], is_f16);
      }
  }
  return 1;
}

/* --- wgmma -------------------------------------------------------------------------------------------------------- */

enum { WGMMA_A_REGISTERS = 1, WGMMA_A_MN = 2, WGMMA_B_MN = 4, WGMMA_F16 = 8, WGMMA_NEGATE_A = 16, WGMMA_NEGATE_B = 32 };

static void op_WGMMA_FENCE(Warp *w, const Insn *i, u32 mask) {
  (void)i, (void)mask;
  w->fence_stamp = ++w->stamp;
}

/* list: n / 2 accumulator slots, then 4 A slots where A is in registers. s0, s1 the descriptors, s2 scale-d. */
static void op_WGMMA(Warp *w, const Insn *i, u32 mask) {
  Machine *m = w->cta->machine;
  const i32 *d = m->lists + i->list;
  i32 registers = i->n / 2, in_registers = i->mod & WGMMA_A_REGISTERS;
  if (mask != FULL) find(m, FIND_CONVERGENCE, -1, w->pc, w->cta, w->index, -1, SPACE_LANES, ~mask);
  if (!w->fence_stamp) find(m, FIND_WGMMA, -1, w->pc, w->cta, w->index, -1, SPACE_NONE, 0);
  for (i32 r = 0; r < registers + (in_registers ? 4 : 0); r++)
    if (w->wgmma_stamp[d[r]] > w->fence_stamp)
      find(m, FIND_WGMMA, -1, w->pc, w->cta, w->index, -1, SPACE_REGISTER, d[r]);
  if (!w->wgmma_agent) w->wgmma_agent = new_agent(w->cta), w->wgmma_clock = 1;
  Async *op = new_async(w, ASYNC_WGMMA, FULL);
  op->agent = w->wgmma_agent;
  op->clock = w->wgmma_clock;
  op->group = w->wgmma_group;
  if (in_registers)
    for (i32 r = 0; r < 4; r++) memcpy(op->registers + 32 * r, slot(w, d[registers + r]), 128);
  else
    op->a_desc = slot64(w, i->s0)[0];
  op->b_desc = slot64(w, i->s1)[0];
  op->scale_d = predicate(w, i->s2) & 1;
  w->wgmma_issued++;
  push(w->cta, op);
}

static i32 wgmma_descriptor(Cta *cta, Async *op, u64 d, i32 mn_major, Descriptor *out) {
  static const u32 swizzle[4] = {0, 128, 64, 32};
  if (d >> 49 & 7) { /* base offsets, for tiles that do not start where the swizzle does, are not modelled */
    fatal(cta->machine, FIND_DESCRIPTOR, -1, op->pc, cta, op->warp, -1, SPACE_VALUE, d);
    return 0;
  }
  *out = (Descriptor){(d & 0x3fff) << 4, (d >> 16 & 0x3fff) << 4, (d >> 32 & 0x3fff) << 4, swizzle[d >> 62], mn_major};
  return 1;
}

static void land_wgmma(Cta *cta, Async *op) {
  float a[16][16], c[16][MAX_COLUMNS];
  Columns b;
  Machine *m = cta->machine;
  const Insn *i = &m->code[op->pc];
  Warp *w = &cta->warps[op->warp];
  const i32 *d = m->lists + i->list;
  i32 is_f16 = i->mod & WGMMA_F16, columns = i->n;
  Actor actor = async_actor(cta, op, FULL);
  if (i->mod & WGMMA_A_REGISTERS) {
    for (i32 r = 0; r < 4; r++)
      LANES for (i32 h = 0; h < 2; h++) /* rows lane / 4 (+ 8), columns 2 (lane % 4) + {0, 1} (+ 8) */
          a[l / 4 + 8 * (r & 1)][2 * (l % 4) + h + 8 * (r >> 1)] =
              half_value(op->registers[32 * r + l] >> 16 * h, is_f16);
  } else {
    Descriptor da;
    if (!wgmma_descriptor(cta, op, op->a_desc, (i->mod & WGMMA_A_MN) != 0, &da)) return;
    if (!read_operand(cta, &actor, &da, 16 * (op->warp & 3), 16, is_f16, &a[0][0], 16, 1)) return;
  }
  Descriptor db;
  if (!wgmma_descriptor(cta, op, op->b_desc, (i->mod & WGMMA_B_MN) != 0, &db)) return;
  if (!read_operand(cta, &actor, &db, 0, columns, is_f16, &b.value[0][0], 1, MAX_COLUMNS)) return;
  if (i->mod & WGMMA_NEGATE_A)
    for (i32 r = 0; r < 16; r++)
      for (i32 k = 0; k < 16; k++) a[r][k] = -a[r][k];
  if (i->mod & WGMMA_NEGATE_B)
    for (i32 k = 0; k < 16; k++)
      for (i32 n = 0; n < columns; n++) b.value[k][n] = -b.value[k][n];
  for (i32 n = 0; n < columns / 8; n++)
    for (i32 r = 0; r < 4; r++) {
      const u32 *from = slot(w, d[4 * n + r]);
      LANES c[l / 4 + 8 * (r >> 1)][8 * n + 2 * (l % 4) + (r & 1)] = op->scale_d ? as_float(from[l]) : 0.0f;
    }
  find_exponents(&b, columns);
  for (i32 r = 0; r < 16; r++) dot16(c[r], a[r], &b, columns);
  for (i32 n = 0; n < columns / 8; n++)
    for (i32 r = 0; r < 4; r++) {
      u32 *to = slot(w, d[4 * n + r]);
      LANES to[l] = as_bits(c[l / 4 + 8 * (r >> 1)][8 * n + 2 * (l % 4) + (r & 1)]);
    }
  m->macs += 16 * 16 * columns;
}

static void op_WGMMA_COMMIT(Warp *w, const Insn *i, u32 mask) {
  (void)i, (void)mask;
  w->wgmma_group++;
  if (w->wgmma_agent) w->wgmma_clock = next_clock(w->cta->machine, w->wgmma_clock);
}
static i32 op_WGMMA_WAIT(Warp *w, const Insn *i, u32 mask) {
  Cta *cta = w->cta;
  for (Async *op = cta->pending; op; op = op->next)
    if (op->kind == ASYNC_WGMMA && op->warp == w->index && (i32)(w->wgmma_group - op->group) > i->imm) {
      w->wait = WAIT_GROUP, w->wait_pc = w->pc;
      return 0;
    }
  if (cta->machine->detect && w->wgmma_agent && (i32)w->wgmma_clock - 1 > i->imm) {
    Knowledge *k = empty_knowledge(cta);
    k->ordered[w->wgmma_agent] = w->wgmma_clock - 1 - i->imm;
    acquire(w, mask, k);
    drop(cta, k);
  }
  return 1;
}

/* An instruction that reads or writes registers that some wgmma uses. One that a wgmma in flight writes is not to be
   touched; one that was touched needs a fence before the next wgmma. `touches` lists the writes, then the reads. */
static void check_wgmma_registers(Warp *w, const i32 *touches) {
  Machine *m = w->cta->machine;
  i32 writes = *touches++, reads = touches[writes];
  w->stamp++;
  for (i32 n = 0; n < writes; n++) w->wgmma_stamp[touches[n]] = w->stamp;
  for (i32 n = 0; n < reads; n++) w->wgmma_stamp[touches[writes + 1 + n]] = w->stamp;
  for (Async *op = w->cta->pending; op; op = op->next) {
    if (op->kind != ASYNC_WGMMA || op->warp != w->index) continue;
    const Insn *mma = &m->code[op->pc];
    for (i32 r = 0; r < mma->n / 2; r++) {
      i32 owned = m->lists[mma->list + r];
      for (i32 n = 0; n < writes; n++)
        if (touches[n] == owned) find(m, FIND_WGMMA, op->pc, w->pc, w->cta, w->index, -1, SPACE_REGISTER, owned);
      for (i32 n = 0; n < reads; n++)
        if (touches[writes + 1 + n] == owned)
          find(m, FIND_WGMMA, op->pc, w->pc, w->cta, w->index, -1, SPACE_REGISTER, owned);
    }
  }
}
