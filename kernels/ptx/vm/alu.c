/* Arithmetic, comparison, conversion and data movement: one function an opcode. Each computes all 32 lanes and writes
   those of the mask. */

static inline u32 *slot(Warp *w, i32 s) {
  return s >= 0 ? w->registers + (u64)s * 32 : w->cta->machine->constants + (u64)(~s) * 32;
}
static inline u64 *slot64(Warp *w, i32 s) { return (u64 *)slot(w, s); }

/* A predicate operand is slot * 2 + negated; slot 0 is true. */
static inline u32 predicate(Warp *w, i32 p) { return w->predicates[p >> 1] ^ (p & 1 ? FULL : 0); }
static inline void set_predicate(Warp *w, i32 p, u32 value, u32 mask) {
  if (p > 1) w->predicates[p >> 1] = (w->predicates[p >> 1] & ~mask) | (value & mask);
}

static inline float as_float(u32 x) {
  float f;
  memcpy(&f, &x, 4);
  return f;
}
static inline u32 as_bits(float f) {
  u32 x;
  memcpy(&x, &f, 4);
  return x;
}
static inline u32 flush(u32 x) { return (x & 0x7f800000) ? x : x & 0x80000000; } /* .ftz */

#define WRITE(T, d, expression)                        \
  do {                                                 \
    if (mask == FULL) {                                \
      LANES d[l] = (T)(expression);                    \
    } else {                                           \
      LANES if (mask >> l & 1) d[l] = (T)(expression); \
    }                                                  \
  } while (0)

#define OPERANDS32                                                         \
  u32 *d = slot(w, i->d0);                                                 \
  const u32 *a = slot(w, i->s0), *b = slot(w, i->s1), *c = slot(w, i->s2); \
  (void)a, (void)b, (void)c
#define OPERANDS64                                                               \
  u64 *d = slot64(w, i->d0);                                                     \
  const u64 *a = slot64(w, i->s0), *b = slot64(w, i->s1), *c = slot64(w, i->s2); \
  (void)a, (void)b, (void)c

#define DEFINE32(name, expression)                          \
  static void op_##name(Warp *w, const Insn *i, u32 mask) { \
    OPERANDS32;                                             \
    WRITE(u32, d, expression);                              \
  }
#define DEFINE64(name, expression)                          \
  static void op_##name(Warp *w, const Insn *i, u32 mask) { \
    OPERANDS64;                                             \
    WRITE(u64, d, expression);                              \
  }

/* --- integer ------------------------------------------------------------------------------------------------------ */

DEFINE32(ADD32, a[l] + b[l])
DEFINE32(SUB32, a[l] - b[l])
DEFINE32(MUL32, a[l] * b[l])
#define HIGH_S32(l) (u32)((u64)((i64)(i32)a[l] * (i32)b[l]) >> 32)
#define HIGH_U32(l) (u32)((u64)a[l] * b[l] >> 32)
#define HIGH_S64(l) (u64)((__int128)(i64)a[l] * (i64)b[l] >> 64)
#define HIGH_U64(l) (u64)((unsigned __int128)a[l] * b[l] >> 64)
DEFINE32(MULHI_S32, HIGH_S32(l))
DEFINE32(MULHI_U32, HIGH_U32(l))
DEFINE64(MULHI_S64, HIGH_S64(l))
DEFINE64(MULHI_U64, HIGH_U64(l))
DEFINE32(MADHI_S32, HIGH_S32(l) + c[l])
DEFINE32(MADHI_U32, HIGH_U32(l) + c[l])
DEFINE64(MADHI_S64, HIGH_S64(l) + c[l])
DEFINE64(MADHI_U64, HIGH_U64(l) + c[l])
DEFINE32(MAD32, a[l] * b[l] + c[l])
DEFINE64(ADD64, a[l] + b[l])
DEFINE64(SUB64, a[l] - b[l])
DEFINE64(MUL64, a[l] * b[l])
DEFINE64(MAD64, a[l] * b[l] + c[l])
/* Division by zero and the overflowing quotient are unspecified in the ISA; all ones and the dividend here. */
DEFINE32(DIV_S32, b[l] == 0 ? FULL : b[l] == FULL ? 0 - a[l] : (u32)((i32)a[l] / (i32)b[l]))
DEFINE32(DIV_U32, b[l] == 0 ? FULL : a[l] / b[l])
DEFINE32(REM_S32, b[l] == 0 ? a[l] : b[l] == FULL ? 0 : (u32)((i32)a[l] % (i32)b[l]))
DEFINE32(REM_U32, b[l] == 0 ? a[l] : a[l] % b[l])
DEFINE64(DIV_S64, b[l] == 0 ? ~0ull : b[l] == ~0ull ? 0 - a[l] : (u64)((i64)a[l] / (i64)b[l]))
DEFINE64(DIV_U64, b[l] == 0 ? ~0ull : a[l] / b[l])
DEFINE64(REM_S64, b[l] == 0 ? a[l] : b[l] == ~0ull ? 0 : (u64)((i64)a[l] % (i64)b[l]))
DEFINE64(REM_U64, b[l] == 0 ? a[l] : a[l] % b[l])
DEFINE32(MIN_S32, MIN((i32)a[l], (i32)b[l]))
DEFINE32(MIN_U32, MIN(a[l], b[l]))
DEFINE32(MAX_S32, MAX((i32)a[l], (i32)b[l]))
DEFINE32(MAX_U32, MAX(a[l], b[l]))
DEFINE64(MIN_S64, MIN((i64)a[l], (i64)b[l]))
DEFINE64(MIN_U64, MIN(a[l], b[l]))
DEFINE64(MAX_S64, MAX((i64)a[l], (i64)b[l]))
DEFINE64(MAX_U64, MAX(a[l], b[l]))
DEFINE32(NEG32, 0 - a[l])
DEFINE64(NEG64, 0 - a[l])
DEFINE32(ABS32, (i32)a[l] < 0 ? 0 - a[l] : a[l])
DEFINE32(AND32, a[l] & b[l])
DEFINE32(OR32, a[l] | b[l])
DEFINE32(XOR32, a[l] ^ b[l])
DEFINE32(NOT32, ~a[l])
DEFINE64(AND64, a[l] & b[l])
DEFINE64(OR64, a[l] | b[l])
DEFINE64(XOR64, a[l] ^ b[l])
DEFINE64(NOT64, ~a[l])
/* Shift counts are 32-bit and clamp. */
DEFINE32(SHL32, b[l] > 31 ? 0 : a[l] << b[l])
DEFINE32(SHR_U32, b[l] > 31 ? 0 : a[l] >> b[l])
DEFINE32(SHR_S32, (i32)a[l] >> MIN(b[l], 31u))
static void op_SHL64(Warp *w, const Insn *i, u32 mask) {
  OPERANDS64;
  const u32 *n = slot(w, i->s1);
  WRITE(u64, d, n[l] > 63 ? 0 : a[l] << n[l]);
}
static void op_SHR_U64(Warp *w, const Insn *i, u32 mask) {
  OPERANDS64;
  const u32 *n = slot(w, i->s1);
  WRITE(u64, d, n[l] > 63 ? 0 : a[l] >> n[l]);
}
static void op_SHR_S64(Warp *w, const Insn *i, u32 mask) {
  OPERANDS64;
  const u32 *n = slot(w, i->s1);
  WRITE(u64, d, (i64)a[l] >> MIN(n[l], 63u));
}
static inline u32 funnel_count(const Insn *i, u32 n) { return i->mod ? MIN(n, 32u) : n & 31; } /* .clamp or .wrap */
DEFINE32(SHF_L, (((u64)b[l] << 32 | a[l]) << funnel_count(i, c[l])) >> 32)
DEFINE32(SHF_R, ((u64)b[l] << 32 | a[l]) >> funnel_count(i, c[l]))
DEFINE32(POPC32, __builtin_popcount(a[l]))
DEFINE32(CLZ32, a[l] ? __builtin_clz(a[l]) : 32)
DEFINE32(BFIND_U32, a[l] ? 31 - __builtin_clz(a[l]) : FULL)
DEFINE32(BREV32, __builtin_bitreverse32(a[l]))
static inline u32 bit_field(u32 value, u32 position, u32 length, i32 is_signed) {
  position &= 255, length &= 255;
  u32 sign = is_signed && length && (value >> MIN(31u, position + length - 1) & 1);
  if (!length) return 0;
  u64 wide = position > 31 ? 0 : value >> position;
  u32 keep_bits = MIN(length, position > 31 ? 0 : 32 - position);
  u32 field = keep_bits >= 32 ? (u32)wide : (u32)wide & ((1u << keep_bits) - 1);
  return sign && keep_bits < 32 ? field | ~((1u << keep_bits) - 1) : field;
}
DEFINE32(BFE_U32, bit_field(a[l], b[l], c[l], 0))
DEFINE32(BFE_S32, bit_field(a[l], b[l], c[l], 1))
static void op_BFI32(Warp *w, const Insn *i, u32 mask) {
  OPERANDS32;
  const u32 *n = slot(w, i->s3);
  LANES if (mask >> l & 1) {
    u32 position = c[l] & 255, length = n[l] & 255;
    u64 field = position > 31 || !length ? 0 : ((length > 31 ? ~0ull : (1ull << length) - 1) << position) & FULL;
    d[l] = (b[l] & ~field) | (((u64)a[l] << (position & 31)) & field);
  }
}
static inline u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 r = 0;
  for (u32 k = 0; k < 8; k++)
    if (table >> k & 1) r |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
  return r;
}
DEFINE32(LOP3, lop3(a[l], b[l], c[l], i->imm))
static inline u32 permute(u32 a, u32 b, u32 selector) {
  u64 bytes = (u64)b << 32 | a;
  u32 r = 0;
  for (u32 k = 0; k < 4; k++) {
    u32 s = selector >> 4 * k & 15, byte = bytes >> 8 * (s & 7) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << 8 * k;
  }
  return r;
}
DEFINE32(PRMT, permute(a[l], b[l], c[l]))
DEFINE32(ADD16, (a[l] + b[l]) & 0xffff)
DEFINE32(SUB16, (a[l] - b[l]) & 0xffff)
DEFINE32(MUL16, (a[l] * b[l]) & 0xffff)
DEFINE32(SHL16, b[l] > 15 ? 0 : (a[l] << b[l]) & 0xffff)
DEFINE32(SHR_U16, b[l] > 15 ? 0 : (a[l] & 0xffff) >> b[l])

#define DEFINE_WIDE(name, type)                                     \
  static void op_MULWIDE_##name(Warp *w, const Insn *i, u32 mask) { \
    u64 *d = slot64(w, i->d0);                                      \
    const u32 *a = slot(w, i->s0), *b = slot(w, i->s1);             \
    WRITE(u64, d, (type)a[l] * (type)b[l]);                         \
  }                                                                 \
  static void op_MADWIDE_##name(Warp *w, const Insn *i, u32 mask) { \
    u64 *d = slot64(w, i->d0);                                      \
    const u32 *a = slot(w, i->s0), *b = slot(w, i->s1);             \
    const u64 *c = slot64(w, i->s2);                                \
    WRITE(u64, d, (u64)((type)a[l] * (type)b[l]) + c[l]);           \
  }
#define SIGNED_WIDE i64)(i32
DEFINE_WIDE(U32, u64)
DEFINE_WIDE(S32, SIGNED_WIDE)

/* --- floating point ----------------------------------------------------------------------------------------------- */

enum { MOD_FTZ = 1, MOD_NAN = 2, MOD_RELU = 4, MOD_NEGATE_PRODUCT = 16, MOD_NEGATE_ADDEND = 32 };
#define CANONICAL_NAN 0x7fffffffu

static inline u32 in_(const Insn *i, u32 x) { return i->mod & MOD_FTZ ? flush(x) : x; }
static inline u32 out_(const Insn *i, float f) {
  u32 x = f != f ? CANONICAL_NAN : as_bits(f);
  return i->mod & MOD_FTZ ? flush(x) : x;
}
/* A product is flushed where it is below 2^-126 when rounded as if exponents had no bound (measured on an H200). */
static inline u32 out_product(const Insn *i, float f, float scaled_by_2_64) {
  u32 x = out_(i, f);
  return (i->mod & MOD_FTZ) && __builtin_fabsf(scaled_by_2_64) < 0x1p-62f ? x & 0x80000000 : x;
}
#define A as_float(in_(i, a[l]))
#define B as_float(in_(i, b[l]))
#define C as_float(in_(i, c[l]))
DEFINE32(FADD, out_(i, A + B))
DEFINE32(FSUB, out_(i, A - B))
static inline u32 product(const Insn *i, float a, float b) {
  return out_product(i, a * b, a * 0x1p32f * (b * 0x1p32f));
}
DEFINE32(FMUL, product(i, A, B))
static inline u32 fused(const Insn *i, float a, float b, float c) {
  return out_product(i, __builtin_fmaf(a, b, c), __builtin_fmaf(a * 0x1p32f, b * 0x1p32f, c * 0x1p64f));
}
DEFINE32(FFMA, fused(i, i->mod &MOD_NEGATE_PRODUCT ? -A : A, B, i->mod &MOD_NEGATE_ADDEND ? -C : C))
DEFINE32(FDIV, out_(i, A / B))
DEFINE32(FRCP, out_(i, 1.0f / A))
DEFINE32(FSQRT, out_(i, __builtin_sqrtf(A)))
DEFINE32(FRSQRT, out_(i, (float)(1.0 / __builtin_sqrt((double)A))))
DEFINE32(FEX2, out_(i, (float)exp2((double)A)))
DEFINE32(FLG2, out_(i, (float)log2((double)A)))
DEFINE32(FNEG, in_(i, a[l]) ^ 0x80000000u)
DEFINE32(FABS, in_(i, a[l]) & 0x7fffffffu)
static inline u32 extreme(const Insn *i, u32 a, u32 b, i32 largest) {
  a = in_(i, a), b = in_(i, b);
  float x = as_float(a), y = as_float(b);
  if (x != x || y != y) return (i->mod & MOD_NAN) || (x != x && y != y) ? CANONICAL_NAN : x != x ? b : a;
  if (x == y) return largest ? a & b : a | b; /* +0 is above -0 */
  return (x > y) == largest ? a : b;
}
DEFINE32(FMIN, extreme(i, a[l], b[l], 0))
DEFINE32(FMAX, extreme(i, a[l], b[l], 1))
#define LOW(x) as_float(in_(i, (u32)(x)))
#define HIGH(x) as_float(in_(i, (u32)((x) >> 32)))
#define PAIR(low, high) ((u64)out_(i, high) << 32 | out_(i, low))
DEFINE64(FADD2, PAIR(LOW(a[l]) + LOW(b[l]), HIGH(a[l]) + HIGH(b[l])))
DEFINE64(FSUB2, PAIR(LOW(a[l]) - LOW(b[l]), HIGH(a[l]) - HIGH(b[l])))
static inline u64 pair(u32 low, u32 high) { return (u64)high << 32 | low; }
DEFINE64(FMUL2, pair(product(i, LOW(a[l]), LOW(b[l])), product(i, HIGH(a[l]), HIGH(b[l]))))
DEFINE64(FFMA2, pair(fused(i, LOW(a[l]), LOW(b[l]), LOW(c[l])), fused(i, HIGH(a[l]), HIGH(b[l]), HIGH(c[l]))))
#undef A
#undef B
#undef C

/* --- comparison and selection ------------------------------------------------------------------------------------- */

enum {
  CMP_EQ,
  CMP_NE,
  CMP_LT,
  CMP_LE,
  CMP_GT,
  CMP_GE,
  CMP_EQU,
  CMP_NEU,
  CMP_LTU,
  CMP_LEU,
  CMP_GTU,
  CMP_GEU,
  CMP_NUM,
  CMP_NAN
};
enum { BOOL_NONE, BOOL_AND, BOOL_OR, BOOL_XOR };

/* setp: d0 = comparison (bool) p, d1 = !comparison (bool) p. */
static void finish_setp(Warp *w, const Insn *i, u32 mask, u32 result) {
  u32 inverse = ~result, other = predicate(w, i->s2);
  switch (i->imm) {
    case BOOL_AND: result &= other, inverse &= other; break;
    case BOOL_OR: result |= other, inverse |= other; break;
    case BOOL_XOR: result ^= other, inverse ^= other; break;
  }
  set_predicate(w, i->d0, result, mask);
  set_predicate(w, i->d1, inverse, mask);
}
#define COMPARE(T, load)                                                 \
  u32 r = 0;                                                             \
  switch (i->mod & 15) {                                                 \
    case CMP_EQ: LANES r |= (u32)((T)load(a) == (T)load(b)) << l; break; \
    case CMP_NE: LANES r |= (u32)((T)load(a) != (T)load(b)) << l; break; \
    case CMP_LT: LANES r |= (u32)((T)load(a) < (T)load(b)) << l; break;  \
    case CMP_LE: LANES r |= (u32)((T)load(a) <= (T)load(b)) << l; break; \
    case CMP_GT: LANES r |= (u32)((T)load(a) > (T)load(b)) << l; break;  \
    case CMP_GE: LANES r |= (u32)((T)load(a) >= (T)load(b)) << l; break; \
  }
#define AT(x) x[l]
#define DEFINE_SETP(name, S, T)                                  \
  static void op_SETP_##name(Warp *w, const Insn *i, u32 mask) { \
    const S *a = (S *)slot(w, i->s0), *b = (S *)slot(w, i->s1);  \
    COMPARE(T, AT)                                               \
    finish_setp(w, i, mask, r);                                  \
  }
DEFINE_SETP(S32, u32, i32)
DEFINE_SETP(U32, u32, u32)
DEFINE_SETP(S64, u64, i64)
DEFINE_SETP(U64, u64, u64)
DEFINE_SETP(S16, u32, int16_t)
DEFINE_SETP(U16, u32, u16)
static void op_SETP_F32(Warp *w, const Insn *i, u32 mask) {
  const u32 *a = slot(w, i->s0), *b = slot(w, i->s1);
  i32 cmp = i->mod & 15, ftz = i->mod & 16, unordered = cmp >= CMP_EQU && cmp <= CMP_GEU;
  u32 r = 0;
  LANES {
    float x = as_float(ftz ? flush(a[l]) : a[l]), y = as_float(ftz ? flush(b[l]) : b[l]);
    u32 nan = x != x || y != y, result = 0;
    switch (unordered ? cmp - CMP_EQU : cmp) {
      case CMP_EQ: result = x == y; break;
      case CMP_NE: result = !nan && x != y; break;
      case CMP_LT: result = x < y; break;
      case CMP_LE: result = x <= y; break;
      case CMP_GT: result = x > y; break;
      case CMP_GE: result = x >= y; break;
      case CMP_NUM: result = !nan; break;
      case CMP_NAN: result = nan; break;
    }
    r |= (result | (unordered ? nan : 0)) << l;
  }
  finish_setp(w, i, mask, r);
}
static void op_SELP32(Warp *w, const Insn *i, u32 mask) {
  OPERANDS32;
  u32 p = predicate(w, i->s2);
  WRITE(u32, d, p >> l & 1 ? a[l] : b[l]);
}
static void op_SELP64(Warp *w, const Insn *i, u32 mask) {
  OPERANDS64;
  u32 p = predicate(w, i->s2);
  WRITE(u64, d, p >> l & 1 ? a[l] : b[l]);
}
#define DEFINE_PREDICATE(name, expression)                  \
  static void op_##name(Warp *w, const Insn *i, u32 mask) { \
    u32 a = predicate(w, i->s0), b = predicate(w, i->s1);   \
    (void)b;                                                \
    set_predicate(w, i->d0, expression, mask);              \
  }
DEFINE_PREDICATE(PAND, a &b)
DEFINE_PREDICATE(POR, a | b)
DEFINE_PREDICATE(PXOR, a ^ b)
DEFINE_PREDICATE(PNOT, ~a)
DEFINE_PREDICATE(PMOV, a)

/* --- conversion --------------------------------------------------------------------------------------------------- */

#define DEFINE_CVT(name, D, S, expression)                  \
  static void op_##name(Warp *w, const Insn *i, u32 mask) { \
    D *d = (D *)slot(w, i->d0);                             \
    const S *a = (S *)slot(w, i->s0);                       \
    WRITE(D, d, expression);                                \
  }
DEFINE_CVT(CVT_U64_U32, u64, u32, a[l])
DEFINE_CVT(CVT_S64_S32, u64, u32, (i64)(i32)a[l])
DEFINE_CVT(CVT_U32_U64, u32, u64, a[l])
DEFINE_CVT(CVT_U32_U16, u32, u32, a[l] & 0xffff)
DEFINE_CVT(CVT_S32_S16, u32, u32, (i32)(int16_t)a[l])
DEFINE_CVT(CVT_U32_U8, u32, u32, a[l] & 0xff)
DEFINE_CVT(CVT_S32_S8, u32, u32, (i32)(int8_t)a[l])
DEFINE_CVT(CVT_U64_U16, u64, u32, a[l] & 0xffff)
DEFINE_CVT(CVT_U16_U32, u32, u32, a[l] & 0xffff)
static inline u32 bf16_of(u32 x) { /* round to nearest even */
  if ((x & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (x + 0x7fff + (x >> 16 & 1)) >> 16;
}
static inline u32 relu_bits(const Insn *i, u32 h) { return (i->mod & MOD_RELU) && (h & 0x8000) && h != 0x7fff ? 0 : h; }
static inline u32 f16_of(float f) {
  u32 x = as_bits(f), sign = x >> 16 & 0x8000;
  x &= 0x7fffffff;
  if (x > 0x7f800000) return 0x7fff;
  if (x >= 0x477ff000) return sign | 0x7c00; /* 65520 and beyond */
  if (x < 0x38800000) {                      /* a subnormal half: round at 2^-24 */
    float scaled = as_float(x) * 16777216.0f;
    u32 n = (u32)scaled;
    float left = scaled - n;
    n += left > 0.5f || (left == 0.5f && (n & 1));
    return sign | n;
  }
  return sign | ((x - 0x38000000 + 0xfff + (x >> 13 & 1)) >> 13);
}
static inline float f16_to_float(u32 h) {
  u32 sign = (h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
  if (e == 31) return as_float(sign | 0x7f800000 | m << 13);
  if (e == 0) return as_float(sign) + (sign ? -1.0f : 1.0f) * (float)m * 5.9604644775390625e-8f;
  return as_float(sign | (e + 112) << 23 | m << 13);
}
DEFINE_CVT(CVT_F32_BF16, u32, u32, a[l] << 16)
DEFINE_CVT(CVT_BF16_F32, u32, u32, relu_bits(i, bf16_of(a[l])))
DEFINE_CVT(CVT_F32_F16, u32, u32, as_bits(f16_to_float(a[l] & 0xffff)))
DEFINE_CVT(CVT_F16_F32, u32, u32, relu_bits(i, f16_of(as_float(a[l]))))
DEFINE32(CVT_BF16X2_F32, relu_bits(i, bf16_of(a[l])) << 16 | relu_bits(i, bf16_of(b[l])))
DEFINE32(CVT_F16X2_F32, relu_bits(i, f16_of(as_float(a[l]))) << 16 | relu_bits(i, f16_of(as_float(b[l]))))
DEFINE_CVT(CVT_F32_S32, u32, u32, as_bits((float)(i32)a[l]))
DEFINE_CVT(CVT_F32_U32, u32, u32, as_bits((float)a[l]))
enum { ROUND_ZERO, ROUND_NEAREST, ROUND_DOWN, ROUND_UP };
static inline double round_to_integer(const Insn *i, float f) {
  switch (i->mod >> 4 & 3) {
    case ROUND_NEAREST: return __builtin_rint(f);
    case ROUND_DOWN: return __builtin_floor(f);
    case ROUND_UP: return __builtin_ceil(f);
    default: return __builtin_trunc(f);
  }
}
static inline u32 to_s32(const Insn *i, float f) {
  double r = round_to_integer(i, as_float(in_(i, as_bits(f))));
  return f != f ? 0 : r >= 2147483647.0 ? 0x7fffffffu : r <= -2147483648.0 ? 0x80000000u : (u32)(i32)r;
}
static inline u32 to_u32(const Insn *i, float f) {
  double r = round_to_integer(i, as_float(in_(i, as_bits(f))));
  return f != f || r <= 0.0 ? 0 : r >= 4294967295.0 ? FULL : (u32)r;
}
DEFINE_CVT(CVT_S32_F32, u32, u32, to_s32(i, as_float(a[l])))
DEFINE_CVT(CVT_U32_F32, u32, u32, to_u32(i, as_float(a[l])))

/* --- movement ----------------------------------------------------------------------------------------------------- */

DEFINE32(MOV32, a[l])
DEFINE64(MOV64, a[l])
static void op_PACK64(Warp *w, const Insn *i, u32 mask) {
  u64 *d = slot64(w, i->d0);
  const u32 *a = slot(w, i->s0), *b = slot(w, i->s1);
  WRITE(u64, d, (u64)b[l] << 32 | a[l]);
}
static void op_UNPACK64(Warp *w, const Insn *i, u32 mask) {
  u64 a[32];
  memcpy(a, slot64(w, i->s0), sizeof a);
  if (i->d0 >= 0) {
    u32 *d = slot(w, i->d0);
    WRITE(u32, d, a[l]);
  }
  if (i->d1 >= 0) {
    u32 *d = slot(w, i->d1);
    WRITE(u32, d, a[l] >> 32);
  }
}
DEFINE32(PACK32, b[l] << 16 | (a[l] & 0xffff))
static void op_UNPACK32(Warp *w, const Insn *i, u32 mask) {
  u32 a[32];
  memcpy(a, slot(w, i->s0), sizeof a);
  if (i->d0 >= 0) {
    u32 *d = slot(w, i->d0);
    WRITE(u32, d, a[l] & 0xffff);
  }
  if (i->d1 >= 0) {
    u32 *d = slot(w, i->d1);
    WRITE(u32, d, a[l] >> 16);
  }
}
enum {
  SPECIAL_TID,
  SPECIAL_LANEID,
  SPECIAL_CTAID_X,
  SPECIAL_NCTAID_X,
  SPECIAL_NTID,
  SPECIAL_WARPID,
  SPECIAL_ZERO,
  SPECIAL_ONE,
  SPECIAL_CLOCK,
  SPECIAL_DYNAMIC_SHARED,
  SPECIAL_TOTAL_SHARED,
  SPECIAL_ACTIVE,
  SPECIAL_LT_MASK,
  SPECIAL_LE_MASK,
  SPECIAL_EQ_MASK,
  SPECIAL_GE_MASK,
  SPECIAL_GT_MASK,
  SPECIAL_CTAID_Y,
  SPECIAL_CTAID_Z,
  SPECIAL_NCTAID_Y,
  SPECIAL_NCTAID_Z
};
static inline u32 special(Warp *w, i32 which, u32 lane) {
  Machine *m = w->cta->machine;
  switch (which) {
    case SPECIAL_TID: return w->index * 32 + lane;
    case SPECIAL_LANEID: return lane;
    case SPECIAL_CTAID_X: return w->cta->index % m->grid[0];
    case SPECIAL_CTAID_Y: return w->cta->index / m->grid[0] % m->grid[1];
    case SPECIAL_CTAID_Z: return w->cta->index / (m->grid[0] * m->grid[1]);
    case SPECIAL_NCTAID_X: return m->grid[0];
    case SPECIAL_NCTAID_Y: return m->grid[1];
    case SPECIAL_NCTAID_Z: return m->grid[2];
    case SPECIAL_NTID: return m->threads;
    case SPECIAL_WARPID: return w->index;
    case SPECIAL_ONE: return 1;
    case SPECIAL_CLOCK: return (u32)m->executed;
    case SPECIAL_DYNAMIC_SHARED: return m->shared_bytes - m->shared_static;
    case SPECIAL_TOTAL_SHARED: return m->shared_bytes;
    case SPECIAL_ACTIVE: return w->active;
    case SPECIAL_LT_MASK: return (1u << lane) - 1;
    case SPECIAL_LE_MASK: return (2u << lane) - 1;
    case SPECIAL_EQ_MASK: return 1u << lane;
    case SPECIAL_GE_MASK: return ~((1u << lane) - 1);
    case SPECIAL_GT_MASK: return ~((2u << lane) - 1);
    default: return 0;
  }
}
static void op_MOV_SPECIAL(Warp *w, const Insn *i, u32 mask) {
  if (i->mod) { /* a 64-bit destination */
    u64 *d = slot64(w, i->d0);
    WRITE(u64, d, special(w, i->imm, l));
  } else {
    u32 *d = slot(w, i->d0);
    WRITE(u32, d, special(w, i->imm, l));
  }
}
