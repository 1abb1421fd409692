// y = x @ W.T for a packed MXFP4 weight on Hopper (sm_90a), decoded between memory and tensor core.
//
// A block owns ROWS rows of x and, one unit after the other, 32 * PARTS * GROUPS rows of the weight, along all of K:
//
//   one thread    words, exponents, x          memory -> ring in shared memory
//   GROUPS groups decode and multiply          words -> registers, the products' left operand; x from the ring -> sums
//
// Each group keeps the sums of its own rows. While its products of 64 columns run, it decodes the next 64: with two
// SETS of operands as soon as the products before are done, with four without waiting, between the two halves of the
// products. Decoded weights never touch memory. The ring runs on from one unit to the next.
//
// A group's left operand has 64 rows, of which the 32 of one tile are each warp's upper eight and those of a second its
// lower eight. With one PART nobody sets or stores the lower ones: half of the decoding, and twice as many blocks for a
// weight of few rows. With GATE a group's second tile holds the up rows of its first one's gate rows, and y is
// silu(gate) * up.
//
// Invariant: K is summed in ascending steps of 16 in one fp32 sum, as in dense.py.
//
// Compile-time parameters: GROUPS; PARTS, 1 or 2; GATE, 0 or 1; ROWS of x a block, a multiple of 16; TILES of 128
// columns a slot of the ring (1, 2 or 4); SLOTS; SETS, 2 or 4; RESIDENT blocks a multiprocessor, 1 or more if they fit;
// STAGED_ROWS of results that a group puts together at once; and the text of an instruction with ROWS / 2 sums: SUMS, its constraints, and OPERANDS, their names.
// Letters: N rows of the weight, M rows of x, K columns of both.

#include "hopper.cuh"

constexpr u32 WORD_BYTES = 2048;     // of a tile, 32 rows x 128 columns
constexpr u32 EXPONENT_BYTES = 128;
constexpr u32 X_BYTES = ROWS * 128;  // of 64 columns
constexpr u32 STREAMS = GROUPS * PARTS;
constexpr u32 STORED = GATE ? 1 : PARTS;  // tiles of results a group

constexpr u32 X_AT = 0;
constexpr u32 WORDS_AT = X_AT + SLOTS * TILES * 2 * X_BYTES;  // [stream][slot][tile], as are the exponents
constexpr u32 STAGED_AT = WORDS_AT + STREAMS * SLOTS * TILES * WORD_BYTES;
constexpr u32 EXPONENTS_AT = STAGED_AT + GROUPS * STAGED_ROWS * 128;
constexpr u32 FULL_AT = EXPONENTS_AT + STREAMS * SLOTS * TILES * EXPONENT_BYTES;
constexpr u32 EMPTY_AT = FULL_AT + SLOTS * 8;

__device__ __forceinline__ void copy(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// Eight codes of a word, of one row, to four pairs of bf16: a turn of the word and a mask put sign and magnitude of one
// column in each half word (packing.BITS says where they lie). scale: a power of two in both half words.
__device__ __forceinline__ void decode(u32 word, u32 scale, u32* pairs) {
  asm volatile(
      "{\n.reg .b32 x0, x1, x2, x3, x4;\n"
      "shl.b32 x0, %4, 2;\nand.b32 x0, x0, 0x81C081C0;\n"
      "shl.b32 x1, %4, 6;\nand.b32 x1, x1, 0x81C081C0;\n"
      "shf.l.wrap.b32 x2, %4, %4, 12;\nand.b32 x2, x2, 0x81C081C0;\n"
      "and.b32 x3, %4, 0x81808180;\nshr.b32 x4, %4, 8;\nlop3.b32 x3, x4, 0x00400040, x3, 0xEA;\n"
      "mul.bf16x2 %0, x0, %5;\nmul.bf16x2 %1, x1, %5;\nmul.bf16x2 %2, x2, %5;\nmul.bf16x2 %3, x3, %5;\n}"
      : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
      : "r"(word), "r"(scale));
}

__device__ __forceinline__ void copy_x(u32 target, const TensorMap* map, u32 k, u32 m, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          target),
      "l"(map), "r"(k), "r"(m), "r"(barrier)
      : "memory");
}

// Eight outputs n, n + 1, ... of one row, as far as there are so many.
__device__ __forceinline__ void store_eight(unsigned short* target, const u32* part, u32 n, u32 outputs) {
  if (outputs % 8 == 0) {
    if (n < outputs) *reinterpret_cast<uint4*>(target) = make_uint4(part[0], part[1], part[2], part[3]);
  } else {
#pragma unroll
    for (u32 i = 0; i < 8; ++i)
      if (n + i < outputs) target[i] = part[i / 2] >> i % 2 * 16;
  }
}

// sums[64, ROWS] += operand[64, 16] @ x[ROWS, 16].T, x by its descriptor in shared memory.
__device__ __forceinline__ void multiply(float* sums, const u32* operand, u64 x) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n" EXPANDED_TEXT(ROWS) "k16.f32.bf16.bf16 " OPERANDS ", 1, 1, 1, 0;"
               : SUMS
               : "r"(operand[0]), "r"(operand[1]), "r"(operand[2]), "r"(operand[3]), "l"(x));
}

// A slot of the ring, and the parity of its barriers.
struct Place {
  u32 slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }
};

// A block's steps along K, unit after unit of the weight.
struct Step {
  u32 column_tiles, unit = blockIdx.y, tile = 0;
  __device__ __forceinline__ void advance() {
    tile += TILES;
    if (tile == column_tiles) tile = 0, unit += gridDim.y;
  }
};

// The 32 rows of the weight that a group has as one of its parts. Past the weight's end they are the last ones again,
// which nobody stores.
__device__ __forceinline__ u32 row_tile(u32 unit, u32 group, u32 part, u32 row_tiles) {
  if (GATE) return min(unit * GROUPS + group, row_tiles / 2 - 1) + part * (row_tiles / 2);
  return min((unit * GROUPS + group) * PARTS + part, row_tiles - 1);
}

// Weights are constant while products run, so a ring's worth of them is fetched while kernels before this one still run,
// as long as those that start others early (griddepcontrol) write no weights; x after their end. first_m: of the block.
__device__ __forceinline__ void fetch(const TensorMap* x_map, const u32* words, const u32* exponents, u32 memory,
                                      u32 first_m, u32 units, u32 row_tiles, u32 column_tiles) {
  auto copy_weight = [&](const Place& place, const Step& step) {
    u32 full = memory + FULL_AT + place.slot * 8;
    expect(full, TILES * (2 * X_BYTES + STREAMS * (WORD_BYTES + EXPONENT_BYTES)));
#pragma unroll
    for (u32 stream = 0; stream < STREAMS; ++stream) {
      u64 first = u64(row_tile(step.unit, stream / PARTS, stream % PARTS, row_tiles)) * column_tiles + step.tile;
      u32 slot = (stream * SLOTS + place.slot) * TILES;
      copy(memory + WORDS_AT + slot * WORD_BYTES, words + first * (WORD_BYTES / 4), TILES * WORD_BYTES, full);
      copy(memory + EXPONENTS_AT + slot * EXPONENT_BYTES, exponents + first * (EXPONENT_BYTES / 4),
           TILES * EXPONENT_BYTES, full);
    }
  };
  auto copy_rows = [&](const Place& place, const Step& step) {
#pragma unroll
    for (u32 i = 0; i < 2 * TILES; ++i)
      copy_x(memory + X_AT + (place.slot * TILES * 2 + i) * X_BYTES, x_map, (step.tile * 2 + i) * 64, first_m,
             memory + FULL_AT + place.slot * 8);
  };
  Place ahead, place;
  Step of_weight{column_tiles}, of_rows{column_tiles};
  for (u32 i = 0; i < SLOTS && of_weight.unit < units; ++i, of_weight.advance(), ahead.advance())
    copy_weight(ahead, of_weight);
  asm volatile("griddepcontrol.wait;" ::: "memory");  // for all that ran before on the stream
  for (u32 i = 0; i < SLOTS && of_rows.unit < units; ++i, of_rows.advance(), place.advance()) copy_rows(place, of_rows);
  for (; of_rows.unit < units; of_rows.advance(), place.advance()) {
    wait(memory + EMPTY_AT + place.slot * 8, place.parity ^ 1);
    copy_weight(place, of_rows);
    copy_rows(place, of_rows);
  }
}

// Sums, rounded, to y by way of shared memory, STAGED_ROWS of x at a time: a store is 16 bytes. first_n: of each tile.
__device__ __forceinline__ void store(const float* sums, u32 group, u32 memory, unsigned short* y, u32 first_n,
                                      u32 first_m, u32 rows, u32 outputs) {
  const u32 thread = threadIdx.x & 127, warp = thread / 32, lane = thread & 31;
  const u32 staged = memory + STAGED_AT + group * STAGED_ROWS * 128;
#pragma unroll
  for (u32 first = 0; first < ROWS; first += STAGED_ROWS) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");  // all have read what lay there
#pragma unroll
    for (u32 m = 0; m < STAGED_ROWS && first + m < ROWS; m += 16) {
      u32 values[4];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const float* pair = sums + (first + m) / 2 + 2 * i;
        float even = pair[0], odd = pair[1];
        if (GATE && i % 2 == 0) even = gated(pair[0], pair[2]), odd = gated(pair[1], pair[3]);
        asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(values[i]) : "f"(odd), "f"(even));
      }
      // Four matrices (n, n of the second tile) x (m, m + 8), turned: eight outputs of one row of x are 16 bytes.
      u32 row = m + lane / 16 * 8 + (lane & 7), part = (lane >> 3 & 1) * 4 + warp;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       staged + row * 128 + (part ^ row & 7) * 16),
                   "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3])
                   : "memory");
    }
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
    constexpr u32 EIGHTS = 4 * STORED;
    for (u32 row = thread / EIGHTS; row < STAGED_ROWS && first + row < ROWS; row += 128 / EIGHTS) {
      u32 m = first_m + first + row, n = first_n + thread % EIGHTS * 8;
      u32 part[4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(part[0]), "=r"(part[1]), "=r"(part[2]), "=r"(part[3])
                   : "r"(staged + row * 128 + (thread % EIGHTS ^ row & 7) * 16)
                   : "memory");
      if (m >= rows) continue;
      store_eight(y + u64(m) * outputs + n, part, n, outputs);
    }
  }
}

__device__ __forceinline__ void multiply_rows(u32 group, u32 memory, unsigned short* y, u32 first_m, u32 rows,
                                              u32 outputs, u32 units, u32 column_tiles) {
  const u32 thread = threadIdx.x & 127, lane = thread & 31;
  constexpr u32 STREAM_TILES = SLOTS * TILES;
  const u32 words_at = memory + WORDS_AT + group * PARTS * STREAM_TILES * WORD_BYTES + thread * 16;
  const u32 exponents_at = memory + EXPONENTS_AT + group * PARTS * STREAM_TILES * EXPONENT_BYTES + thread / 4 * 4;

  u32 operands[SETS][4][4];
  u32 words[2][PARTS][4], exponents[2][PARTS];  // of an even tile and of an odd one
  auto load = [&](u32 slot, u32 tile, u32 odd) {
#pragma unroll
    for (u32 part = 0; part < PARTS; ++part) {
      const u32 at = (part * SLOTS + slot) * TILES + tile;
      u32* to = words[odd][part];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "r"(words_at + at * WORD_BYTES)
                   : "memory");
      asm volatile("ld.shared.b32 %0, [%1];"
                   : "=r"(exponents[odd][part])
                   : "r"(exponents_at + at * EXPONENT_BYTES)
                   : "memory");
    }
  };
  // 32 columns of a step of 64, of which a word has eight of one row: two products' worth. An exponent seven bits up is
  // a power of two.
  auto decode_half = [&](u32 step, u32 half) {
    const u32 odd = step / 2 % 2, quarter = step % 2 * 2 + half;
#pragma unroll
    for (u32 part = 0; part < PARTS; ++part) {
      u32 pairs[4];
      decode(words[odd][part][quarter], __byte_perm(exponents[odd][part], 0, 0x4440 | quarter) * 0x00800080, pairs);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) operands[step % SETS][half * 2 + i / 2][i % 2 * 2 + part] = pairs[i];
    }
    if (PARTS == 1) {  // whatever lies in the registers of lower eights: zeros would be written anew each time
#pragma unroll
      for (u32 i = 0; i < 4; ++i)
        asm volatile("" : "=r"(operands[step % SETS][half * 2 + i / 2][i % 2 * 2 + 1]));
    }
  };

  Place place;
  const u64 x_at = descriptor(memory + X_AT);
  for (u32 unit = blockIdx.y; unit < units; unit += gridDim.y) {
    float sums[ROWS / 2];
#pragma unroll
    for (u32 i = 0; i < ROWS / 2; ++i)  // not moved past the fence that makes them the products' own
      asm volatile("mov.f32 %0, 0f00000000;" : "=f"(sums[i]));
    // Words are loaded three steps of 64 columns ahead of their products and decoded one step ahead.
    Place ahead = place;
    wait(memory + FULL_AT + ahead.slot * 8, ahead.parity);
    load(ahead.slot, 0, 0);
    if (TILES == 1) {
      ahead.advance();
      wait(memory + FULL_AT + ahead.slot * 8, ahead.parity);
    }
    load(ahead.slot, 1 % TILES, 1);
    decode_half(0, 0);
    decode_half(0, 1);
    u32 last_slot = 0;  // of the step before
    bool ready = false;
    constexpr u32 TOGETHER = TILES < 2 ? 2 : TILES;
#pragma unroll 1
    for (u32 first = 0; first < column_tiles; first += TOGETHER) {
#pragma unroll
      for (u32 step = 0; step < 2 * TOGETHER; ++step) {
        const u32 tile = step / 2;
        const bool new_slot = (tile + 2) % TILES == 0;
        if (step % 2 == 0 && new_slot) {
          Place next = ahead;
          next.advance();
          ready = passed(memory + FULL_AT + next.slot * 8, next.parity);
        }
        if (step % 2 == 1) {
          if (new_slot) {
            ahead.advance();
            wait(memory + FULL_AT + ahead.slot * 8, ahead.parity, !ready && first + tile + 2 < column_tiles);
          }
          load(ahead.slot, (tile + 2) % TILES, tile % 2);  // past the last tile, words that nobody multiplies
        }
        u64 x = x_at + ((place.slot * TILES + tile % TILES) * 2 + step % 2) * (X_BYTES / 16);
        constexpr u32 PRODUCTS = SETS == 2 ? 4 : 2;  // of the four of a step
#pragma unroll
        for (u32 part = 0; part < 4; part += PRODUCTS) {
          multiply_fence();
#pragma unroll
          for (u32 q = part; q < part + PRODUCTS; ++q) multiply(sums, operands[step % SETS][q], x + q * 2);
          multiply_commit();
          if (SETS == 2) multiply_wait<1>();
#pragma unroll
          for (u32 q = part; q < part + PRODUCTS; q += 2) decode_half((step + 1) % (2 * TOGETHER), q / 2);
        }
        if (SETS == 4) multiply_wait<2>();
        // The products of the step before are done.
        if (step % 2 == 0 && tile % TILES == 0)
          arrive(memory + EMPTY_AT + last_slot * 8, lane == 0 && first + tile > 0);
        if (step % 2 == 1 && tile % TILES == TILES - 1) {
          last_slot = place.slot;
          place.advance();
        }
      }
    }
    multiply_wait<0>();
    arrive(memory + EMPTY_AT + last_slot * 8, lane == 0);
    store(sums, group, memory, y, (unit * GROUPS + group) * 32 * STORED, first_m, rows, outputs);
  }
}

// outputs: of y, half of the weight's rows with GATE. units: of the weight's rows.
extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), RESIDENT)
    mxfp4_mm(const __grid_constant__ TensorMap x_map, const u32* words, const u32* exponents, unsigned short* y,
             u32 rows, u32 outputs, u32 column_tiles, u32 row_tiles, u32 units) {
  const u32 memory = shared_base();
  // A product that follows on the stream may take its place on the multiprocessors as soon as blocks leave them.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // Blocks that share rows of the weight are neighbours, so that memory is read once.
  const u32 first_m = blockIdx.x * ROWS;
  if (threadIdx.x == 128 * GROUPS) {
    for (u32 slot = 0; slot < SLOTS; ++slot) {
      init(memory + FULL_AT + slot * 8, 1);
      init(memory + EMPTY_AT + slot * 8, 4 * GROUPS);  // a lane of each warp
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  // The shuffle tells the compiler that a warp takes one way; else it makes products wait for each other.
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
  if (group == GROUPS) {
    if (RESIDENT == 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == 4 * GROUPS && elected())
      fetch(&x_map, words, exponents, memory, first_m, units, row_tiles, column_tiles);
  } else {
    if (RESIDENT == 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 1 ? 232 : 240));
    multiply_rows(group, memory, y, first_m, rows, outputs, units, column_tiles);
  }
}
