/* Landing: what makes an asynchronous operation happen, and which may be next. */

static u32 draw(Machine *m, u32 below) { /* xorshift64* */
  u64 x = m->random;
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  m->random = x;
  return (u32)((x * 2685821657736338717ull >> 33) % below);
}

/* Operations of one queue land in order; 0 is no queue. */
static i32 same_queue(const Async *a, const Async *b) {
  if (a->kind == ASYNC_WGMMA) return b->kind == ASYNC_WGMMA && a->warp == b->warp;
  if (a->kind == ASYNC_TC5_MMA || a->kind == ASYNC_TC5_COMMIT)
    return b->kind == ASYNC_TC5_MMA || b->kind == ASYNC_TC5_COMMIT;
  if (a->kind == ASYNC_CP_ARRIVE)
    return (b->kind == ASYNC_CP || b->kind == ASYNC_CP_ARRIVE) && a->warp == b->warp && (a->mask & b->mask);
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
