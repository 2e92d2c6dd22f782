/* Memory: shared and global, with the shadow that says who wrote and read each granule last. */

enum { ACCESS_READ, ACCESS_WRITE, ACCESS_ATOMIC };

/* Readers of one granule that are not ordered with each other. Its arrays are kept when a set is used again. */
static ReaderSet *new_reader_set(Cta *cta, i32 *index) {
  if (!cta->free_reader_sets_count && cta->reader_sets_used == cta->reader_sets_size) {
    cta->reader_sets_size = cta->reader_sets_size ? 2 * cta->reader_sets_size : 1024;
    cta->reader_sets = realloc(cta->reader_sets, cta->reader_sets_size * sizeof(ReaderSet));
    cta->free_reader_sets = realloc(cta->free_reader_sets, cta->reader_sets_size * sizeof(i32));
  }
  if (cta->free_reader_sets_count) {
    *index = cta->free_reader_sets[--cta->free_reader_sets_count];
  } else {
    *index = cta->reader_sets_used++;
    cta->reader_sets[*index] = (ReaderSet){0, 8, malloc(8 * sizeof(u32))};
  }
  cta->reader_sets[*index].count = 0;
  return &cta->reader_sets[*index];
}

/* Add a reader. It takes the place of one that it knows to have read before. */
static void add_reader(const Actor *a, ReaderSet *set) {
  u32 agent = AGENT(a->epoch);
  for (i32 n = 0; n < set->count; n++)
    if (AGENT(set->epochs[n]) == agent || knows(a, set->epochs[n])) {
      set->epochs[n] = a->epoch;
      return;
    }
  if (set->count == set->size) set->epochs = realloc(set->epochs, (set->size *= 2) * sizeof(u32));
  set->epochs[set->count++] = a->epoch;
}

/* A read of granules [first, last] whose shadow is at these arrays. Returns whether the async proxy would have seen
   what was there before. */
static i32 shadow_read(Machine *m, const Actor *a, u32 *written, u32 *written_pc, u32 *read, u32 *read_pc, u64 first,
                       u64 last, i32 space, u64 address) {
  i32 stale = 0;
  for (u64 g = first; g <= last; g++) {
    u32 w = written[g];
    if (!w) {
      find(m, FIND_UNWRITTEN, -1, a->pc, a->cta, a->warp, a->lane, space, address);
    } else if (!knows(a, w)) {
      find(m, FIND_RACE_RAW, WRITTEN_PC(written_pc[g]), a->pc, a->cta, a->warp, a->lane, space, address);
    } else if (a->async && !(written_pc[g] & ASYNC_WRITTEN) && !sees_through_async_proxy(a, w)) {
      find(m, FIND_FENCE, WRITTEN_PC(written_pc[g]), a->pc, a->cta, a->warp, a->lane, space, address);
      stale = 1;
    }
    u32 r = read[g];
    if (r & READ_SHARED) {
      add_reader(a, &a->cta->reader_sets[r & ~READ_SHARED]);
    } else if (!r || AGENT(r) == AGENT(a->epoch) || knows(a, r)) {
      read[g] = a->epoch;
    } else {
      i32 index;
      ReaderSet *set = new_reader_set(a->cta, &index);
      set->epochs[set->count++] = r;
      set->epochs[set->count++] = a->epoch;
      read[g] = READ_SHARED | index;
    }
    read_pc[g] = a->pc;
  }
  return stale;
}

/* Atomics do not conflict with each other. */
static void shadow_write(Machine *m, const Actor *a, u32 *written, u32 *written_pc, u32 *read, u32 *read_pc, u64 first,
                         u64 last, i32 space, u64 address, i32 access) {
  for (u64 g = first; g <= last; g++) {
    u32 w = written[g], r = read[g];
    if (access == ACCESS_ATOMIC && !w) find(m, FIND_UNWRITTEN, -1, a->pc, a->cta, a->warp, a->lane, space, address);
    if (!knows(a, w) && !(access == ACCESS_ATOMIC && written_pc[g] & ATOMIC_WRITTEN)) {
      find(m, FIND_RACE_WAW, WRITTEN_PC(written_pc[g]), a->pc, a->cta, a->warp, a->lane, space, address);
    } else if (a->async && w && !(written_pc[g] & ASYNC_WRITTEN) && !sees_through_async_proxy(a, w)) {
      find(m, FIND_FENCE, WRITTEN_PC(written_pc[g]), a->pc, a->cta, a->warp, a->lane, space, address);
    }
    if (r & READ_SHARED) {
      const ReaderSet *set = &a->cta->reader_sets[r & ~READ_SHARED];
      for (i32 n = 0; n < set->count; n++)
        if (AGENT(set->epochs[n]) != AGENT(a->epoch) && !knows(a, set->epochs[n])) {
          find(m, FIND_RACE_WAR, read_pc[g], a->pc, a->cta, a->warp, a->lane, space, address);
          break;
        }
      a->cta->free_reader_sets[a->cta->free_reader_sets_count++] = r & ~READ_SHARED;
    } else if (r && AGENT(r) != AGENT(a->epoch) && !knows(a, r)) {
      find(m, FIND_RACE_WAR, read_pc[g], a->pc, a->cta, a->warp, a->lane, space, address);
    }
    read[g] = 0;
    written[g] = a->epoch;
    written_pc[g] = a->pc | (a->async ? ASYNC_WRITTEN : 0) | (access == ACCESS_ATOMIC ? ATOMIC_WRITTEN : 0);
  }
}

/* Shared memory at [address, address + bytes), or NULL where it is out of bounds or misaligned. */
static u8 *shared_at(Machine *m, const Actor *a, u32 address, u32 bytes, u32 align, i32 access) {
  if ((u64)address + bytes > (u64)m->shared_bytes) {
    fatal(m, FIND_BOUNDS, -1, a->pc, a->cta, a->warp, a->lane, SPACE_SHARED, address);
    return 0;
  }
  if (address & (align - 1)) {
    fatal(m, FIND_ALIGN, -1, a->pc, a->cta, a->warp, a->lane, SPACE_SHARED, address);
    return 0;
  }
  if (m->detect) {
    Cta *c = a->cta;
    u64 first = address >> m->granule_shift, last = (address + bytes - 1) >> m->granule_shift;
    if (access != ACCESS_READ) {
      shadow_write(m, a, c->written, c->written_pc, c->read, c->read_pc, first, last, SPACE_SHARED, address, access);
    } else if (shadow_read(m, a, c->written, c->written_pc, c->read, c->read_pc, first, last, SPACE_SHARED, address) &&
               bytes <= sizeof m->stale) {
      memset(m->stale, 0xff, bytes);
      return m->stale;
    }
    if (!a->async)
      for (u32 b = address >> 3; b <= (address + bytes - 1) >> 3; b++)
        if (c->mbarriers[b].valid)
          find(m, FIND_MBARRIER, c->mbarriers[b].init_pc, a->pc, c, a->warp, a->lane, SPACE_SHARED, address);
  }
  (access == ACCESS_READ ? m->bytes_read : m->bytes_written)[SPACE_SHARED] += bytes;
  return a->cta->shared + address;
}

static Allocation *allocation_at(Machine *m, u64 address, u64 bytes) {
  for (i32 i = 0; i < m->allocation_count; i++) {
    Allocation *g = &m->allocations[i];
    if (address >= g->va && address + bytes <= g->va + g->bytes && address + bytes >= address) return g;
  }
  return 0;
}

/* Another CTA's access to writable memory is never ordered within one launch; one of the same CTA follows the clocks.
   Atomics do not conflict with each other. */
static void shadow_global(Machine *m, const Actor *a, Allocation *g, u64 first, u64 last, i32 access, u64 address) {
  u16 me = a->cta->index + 1;
  for (u64 i = first; i <= last; i++) {
    u32 w = g->written[i], wpc = WRITTEN_PC(g->written_pc[i]);
    i32 w_atomic = (g->written_pc[i] & ATOMIC_WRITTEN) != 0;
    i32 ordered = w <= 1 || (g->written_cta[i] == me && knows(a, w));
    if (a->async && w > 1 && ordered && !(g->written_pc[i] & ASYNC_WRITTEN) && !sees_through_async_proxy(a, w))
      find(m, FIND_FENCE, wpc, a->pc, a->cta, a->warp, a->lane, SPACE_GLOBAL, address);
    if (access == ACCESS_READ) {
      if (!w)
        find(m, FIND_UNWRITTEN, -1, a->pc, a->cta, a->warp, a->lane, SPACE_GLOBAL, address);
      else if (!ordered)
        find(m, FIND_RACE_RAW, wpc, a->pc, a->cta, a->warp, a->lane, SPACE_GLOBAL, address);
      g->read[i] = a->epoch;
      g->read_pc[i] = a->pc;
      g->read_cta[i] = me;
      continue;
    }
    if (access == ACCESS_ATOMIC && !w)
      find(m, FIND_UNWRITTEN, -1, a->pc, a->cta, a->warp, a->lane, SPACE_GLOBAL, address);
    if (!ordered && !(access == ACCESS_ATOMIC && w_atomic))
      find(m, FIND_RACE_WAW, wpc, a->pc, a->cta, a->warp, a->lane, SPACE_GLOBAL, address);
    u32 r = g->read[i];
    if (r > 1 && !(g->read_cta[i] == me && (AGENT(r) == AGENT(a->epoch) || knows(a, r))))
      find(m, FIND_RACE_WAR, g->read_pc[i], a->pc, a->cta, a->warp, a->lane, SPACE_GLOBAL, address);
    g->written[i] = a->epoch;
    g->written_pc[i] = a->pc | (a->async ? ASYNC_WRITTEN : 0) | (access == ACCESS_ATOMIC ? ATOMIC_WRITTEN : 0);
    g->written_cta[i] = me;
    g->read[i] = 0;
  }
}

static u8 *global_at(Machine *m, const Actor *a, u64 address, u32 bytes, u32 align, i32 access) {
  Allocation *g = allocation_at(m, address, bytes);
  if (!g) {
    fatal(m, FIND_BOUNDS, -1, a->pc, a->cta, a->warp, a->lane, SPACE_GLOBAL, address);
    return 0;
  }
  if (address & (align - 1)) {
    fatal(m, FIND_ALIGN, -1, a->pc, a->cta, a->warp, a->lane, SPACE_GLOBAL, address);
    return 0;
  }
  if (access != ACCESS_READ && !g->writable) {
    fatal(m, FIND_READONLY, -1, a->pc, a->cta, a->warp, a->lane, SPACE_GLOBAL, address);
    return 0;
  }
  if (m->detect && g->writable) {
    u64 offset = address - g->va;
    shadow_global(m, a, g, offset >> m->global_granule_shift, (offset + bytes - 1) >> m->global_granule_shift, access,
                  address);
  }
  (access == ACCESS_READ ? m->bytes_read : m->bytes_written)[SPACE_GLOBAL] += bytes;
  return g->host + (address - g->va);
}

/* Generic addresses: shared memory is a window of them. */
#define SHARED_WINDOW 0x0500000000000000ull

static u8 *lane_memory(Machine *m, const Actor *a, i32 space, u64 address, u32 bytes, u32 align, i32 access) {
  if (space == SPACE_GENERIC) {
    space = address >= SHARED_WINDOW ? SPACE_SHARED : SPACE_GLOBAL;
    if (space == SPACE_SHARED) address -= SHARED_WINDOW;
  }
  if (space == SPACE_SHARED) return shared_at(m, a, (u32)address, bytes, align, access);
  return global_at(m, a, address, bytes, align, access);
}
