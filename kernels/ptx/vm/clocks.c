/* Findings, and what each lane and operation knows to have happened before it. */

static void find(Machine *m, i32 kind, i32 before, i32 now, Cta *cta, i32 warp, i32 lane, i32 space, u64 address) {
  for (i32 i = 0; i < m->finding_count && kind != FIND_DEADLOCK; i++) { /* a deadlock lists every warp */
    Finding *f = &m->findings[i];
    if (f->kind == kind && f->pc_before == before && f->pc_now == now) {
      f->count++;
      return;
    }
  }
  if (m->finding_count == MAX_FINDINGS) return;
  m->findings[m->finding_count++] =
      (Finding){kind, before, now, cta ? cta->index : -1, warp, lane, space, 0, address, 1, {0, 0, 0}};
  if (m->stop_on_finding) m->fatal = 1;
}

static void fatal(Machine *m, i32 kind, i32 before, i32 now, Cta *cta, i32 warp, i32 lane, i32 space, u64 address) {
  find(m, kind, before, now, cta, warp, lane, space, address);
  m->fatal = 1;
}

static Knowledge *knowledge_new(Cta *cta) {
  Knowledge *k = cta->free_knowledge;
  if (k) {
    cta->free_knowledge = k->next_free;
  } else {
    k = malloc(sizeof *k + 2 * MAX_AGENTS * sizeof(u32));
    k->ordered = (u32 *)(k + 1);
    k->fenced = k->ordered + MAX_AGENTS;
    memset(k->ordered, 0, 2 * MAX_AGENTS * sizeof(u32));
  }
  k->references = 1;
  return k;
}

static Knowledge *keep(Knowledge *k) {
  if (k) k->references++;
  return k;
}

static void drop(Cta *cta, Knowledge *k) {
  if (k && --k->references == 0) {
    k->next_free = cta->free_knowledge;
    cta->free_knowledge = k;
  }
}

static Knowledge *empty_knowledge(Cta *cta) {
  Knowledge *k = knowledge_new(cta);
  memset(k->ordered, 0, cta->agents * sizeof(u32));
  memset(k->fenced, 0, cta->agents * sizeof(u32));
  return k;
}

static Knowledge *copy_knowledge(Cta *cta, const Knowledge *from) {
  Knowledge *k = knowledge_new(cta);
  memcpy(k->ordered, from->ordered, cta->agents * sizeof(u32));
  memcpy(k->fenced, from->fenced, cta->agents * sizeof(u32));
  return k;
}

static void join_vectors(Cta *cta, Knowledge *into, const Knowledge *from) {
  for (i32 a = 0; a < cta->agents; a++) into->ordered[a] = MAX(into->ordered[a], from->ordered[a]);
  for (i32 a = 0; a < cta->agents; a++) into->fenced[a] = MAX(into->fenced[a], from->fenced[a]);
}

static i32 knows_all(Cta *cta, const Knowledge *k, const Knowledge *other) {
  u32 missing = 0;
  for (i32 a = 0; a < cta->agents; a++)
    missing |= (k->ordered[a] < other->ordered[a]) | (k->fenced[a] < other->fenced[a]);
  return !missing;
}

/* *place, made changeable: a copy of its own where others hold the same object. */
static Knowledge *own(Cta *cta, Knowledge **place) {
  if ((*place)->references > 1) {
    Knowledge *k = copy_knowledge(cta, *place);
    drop(cta, *place);
    *place = k;
  }
  return *place;
}

/* The lanes of mask learn what `from` knows. Lanes that share an object go on sharing one. */
static void acquire(Warp *w, u32 mask, const Knowledge *from) {
  if (!from || !w->cta->machine->detect) return;
  while (mask) {
    Knowledge *k = w->knowledge[__builtin_ctz(mask)];
    u32 sharers = 0;
    LANES if ((mask >> l & 1) && w->knowledge[l] == k) sharers |= 1u << l;
    mask &= ~sharers;
    if (knows_all(w->cta, k, from)) continue;
    Knowledge *target = k;
    if (k->references > __builtin_popcount(sharers)) {
      target = copy_knowledge(w->cta, k);
      target->references = 0;
      LANES if (sharers >> l & 1) {
        drop(w->cta, w->knowledge[l]);
        w->knowledge[l] = keep(target);
      }
    }
    join_vectors(w->cta, target, from);
  }
}

static u32 next_clock(Machine *m, u32 clock) {
  if (clock >= CLOCK_MASK - 1) m->fatal = 1, find(m, FIND_LIMIT, -1, -1, 0, -1, -1, SPACE_NONE, 0);
  return clock + 1;
}

/* What the lanes of mask know, and did themselves, becomes part of *into. */
static void release(Warp *w, u32 mask, Knowledge **into) {
  Cta *cta = w->cta;
  if (!cta->machine->detect || !mask) return;
  if (!*into) *into = empty_knowledge(cta);
  Knowledge *k = own(cta, into);
  u32 left = mask;
  while (left) {
    Knowledge *from = w->knowledge[__builtin_ctz(left)];
    LANES if ((left >> l & 1) && w->knowledge[l] == from) left &= ~(1u << l);
    join_vectors(cta, k, from);
  }
  LANES if (mask >> l & 1) {
    i32 agent = 1 + w->index * 32 + l;
    k->ordered[agent] = MAX(k->ordered[agent], w->clock[l]);
    k->fenced[agent] = MAX(k->fenced[agent], w->fenced_clock[l]);
    w->clock[l] = next_clock(cta->machine, w->clock[l]);
  }
}

/* bar.warp.sync, and whatever else orders the memory accesses of a warp's lanes. */
static void order_lanes(Warp *w, u32 mask) {
  if (!w->cta->machine->detect) return;
  Knowledge *k = 0;
  release(w, mask, &k);
  LANES if (mask >> l & 1) {
    drop(w->cta, w->knowledge[l]);
    w->knowledge[l] = keep(k);
  }
  drop(w->cta, k);
}

/* fence.proxy.async: all that the lanes know of the generic proxy, the async proxy sees from here on. */
static void fence_proxy(Warp *w, u32 mask) {
  Cta *cta = w->cta;
  if (!cta->machine->detect) return;
  u32 left = mask;
  while (left) {
    Knowledge *k = w->knowledge[__builtin_ctz(left)];
    u32 sharers = 0;
    LANES if ((left >> l & 1) && w->knowledge[l] == k) sharers |= 1u << l;
    left &= ~sharers;
    Knowledge *target = k;
    if (k->references > __builtin_popcount(sharers)) {
      target = copy_knowledge(cta, k);
      target->references = 0;
      LANES if (sharers >> l & 1) {
        drop(cta, w->knowledge[l]);
        w->knowledge[l] = keep(target);
      }
    }
    for (i32 a = 0; a < cta->agents; a++) target->fenced[a] = MAX(target->fenced[a], target->ordered[a]);
  }
  LANES if (mask >> l & 1) {
    w->fenced_clock[l] = w->clock[l];
    w->clock[l] = next_clock(cta->machine, w->clock[l]);
  }
}

static u32 new_agent(Cta *cta) {
  if (cta->agents == MAX_AGENTS) {
    fatal(cta->machine, FIND_LIMIT, -1, -1, cta, -1, -1, SPACE_NONE, 0);
    return MAX_AGENTS - 1;
  }
  for (Knowledge *k = cta->free_knowledge; k; k = k->next_free) k->ordered[cta->agents] = k->fenced[cta->agents] = 0;
  return cta->agents++;
}

/* --- who accesses, and what that one knows ----------------------------------------------------------------------- */

/* One side of a conflict check. */
typedef struct {
  Cta *cta;
  const Knowledge *knowledge;
  const u32 *clocks, *fenced_clocks; /* of the lanes of the warp that acts or that issued */
  i32 first_agent;                   /* of those lanes */
  u32 lanes;                         /* the lanes whose own earlier accesses are ordered */
  u32 epoch;
  i32 async, pc, warp, lane;
  u32 pipe; /* an agent whose operations run in the order of their issue, this one among them */
} Actor;

static inline i32 knows(const Actor *a, u32 epoch) {
  u32 agent = AGENT(epoch), clock = CLOCK(epoch);
  if (epoch <= 1 || epoch == a->epoch || a->knowledge->ordered[agent] >= clock) return 1;
  if (a->pipe && agent == a->pipe) return 1;
  u32 lane = agent - a->first_agent;
  return lane < 32 && (a->lanes >> lane & 1) && a->clocks[lane] >= clock;
}

static inline i32 sees_through_async_proxy(const Actor *a, u32 epoch) {
  u32 agent = AGENT(epoch), clock = CLOCK(epoch);
  if (epoch <= 1 || a->knowledge->fenced[agent] >= clock) return 1;
  u32 lane = agent - a->first_agent;
  return lane < 32 && (a->lanes >> lane & 1) && a->fenced_clocks[lane] >= clock;
}

static inline Actor lane_actor(Warp *w, i32 lane, i32 pc) {
  i32 agent = 1 + w->index * 32 + lane;
  return (Actor){w->cta,
                 w->knowledge[lane],
                 w->clock,
                 w->fenced_clock,
                 1 + w->index * 32,
                 1u << lane,
                 EPOCH(agent, w->clock[lane]),
                 0,
                 pc,
                 w->index,
                 lane,
                 0};
}

static inline Actor async_actor(Cta *cta, Async *op, u32 lanes) {
  return (Actor){cta,
                 op->knowledge,
                 op->clocks,
                 op->fenced_clocks,
                 1 + op->warp * 32,
                 lanes,
                 EPOCH(op->agent, op->clock),
                 1,
                 op->pc,
                 op->warp,
                 lanes ? __builtin_ctz(lanes) : -1,
                 0};
}

/* Agents above the threads write through the async proxy, except those of cp.async, which is generic. */
#define ASYNC_WRITTEN 0x80000000u /* in a written_pc */
#define ATOMIC_WRITTEN 0x40000000u
#define WRITTEN_PC(x) ((x) & ~(ASYNC_WRITTEN | ATOMIC_WRITTEN))
