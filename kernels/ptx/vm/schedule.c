/* The scheduler: which warp runs next, when operations land, and what is left over at the end. */

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
      find(m, FIND_PENDING, op->pc, -1, cta, op->warp, -1, SPACE_NONE, 0);
  /* Shared memory that an operation still reads when its CTA ends may be given to another one. */
  while (cta->pending) {
    Async *op = cta->pending;
    if (op->kind == ASYNC_BULK_STORE || op->kind == ASYNC_TMA_STORE)
      find(m, FIND_PENDING, op->pc, -1, cta, op->warp, -1, SPACE_NONE, 0);
    land(cta, op);
  }
  i32 warps = m->threads / 32;
  for (i32 n = 0; n < warps; n++) {
    Warp *w = &cta->warps[n];
    if ((n & 3) && w->wgmma_issued != cta->warps[n & ~3].wgmma_issued)
      find(m, FIND_WGMMA, -1, -1, cta, n, -1, SPACE_VALUE, w->wgmma_issued);
    LANES drop(cta, w->knowledge[l]);
  }
  for (i32 n = 0; n < m->shared_bytes / 8; n++) {
    drop(cta, cta->mbarriers[n].released);
    drop(cta, cta->mbarriers[n].completed);
  }
  for (i32 n = 0; n < 17; n++) drop(cta, cta->barriers[n].released);
  if (cta->tmem_live) find(m, FIND_TMEM, -1, -1, cta, -1, -1, SPACE_VALUE, cta->tmem_live);
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
      while (!m->fatal && land_one(m, ctas, resident)) {
      }
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
      if (m->starve_left)
        m->starve_left--;
      else if (draw(m, 64) == 0)
        m->starve_left = draw(m, 400), m->starved_warp = draw(m, MAX(1, warps / 4) + 1) - 1;
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
    if (m->executed > m->instruction_limit)
      fatal(m, FIND_LIMIT, -1, chosen->pc, chosen->cta, chosen->index, -1, SPACE_VALUE, m->executed);
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
    for (i32 k = 0; k < warps; k++)
      free(c->warps[k].registers), free(c->warps[k].predicates), free(c->warps[k].wgmma_stamp),
          free(c->warps[k].tc5_loading);
    free(c->shared), free(c->written), free(c->written_pc), free(c->read), free(c->read_pc), free(c->mbarriers),
        free(c->warps);
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
