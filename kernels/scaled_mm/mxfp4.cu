// y = x @ W.T for a packed MXFP4 weight on Hopper (sm_90a), decoded between memory and tensor core.
//
// A block owns 64 * GROUPS rows of the weight and ROWS rows of x, and walks along K:
//
//   one thread    words, exponents, x          memory -> ring in shared memory
//   GROUPS groups decode and multiply          words -> registers, the products' left operand; x from the ring -> sums
//
// Each group keeps the sums of its own 64 rows. While its products of 64 columns run, it decodes the next 64: with two
// SETS of operands as soon as the products before are done, with four without waiting, between the two halves of the
// products. Decoded weights never touch memory.
//
// Invariant: K is summed in ascending steps of 16 in one fp32 sum, as in dense.py.
//
// Compile-time parameters: GROUPS; ROWS of x a block, a multiple of 16; TILES of 64 columns a slot of the ring (1, 2 or
// 4); SLOTS; SETS, 2 or 4; RESIDENT blocks a multiprocessor, 1 or more if they fit; and the text of an instruction with ROWS / 2 sums: SUMS, its constraints, and OPERANDS,
// their names.
// Letters: N rows of the weight, M rows of x, K columns of both.

#include "hopper.cuh"

constexpr u32 WORD_BYTES = 2048;     // of a tile, 64 rows x 64 columns
constexpr u32 EXPONENT_BYTES = 128;
constexpr u32 X_BYTES = ROWS * 128;  // of 64 columns

constexpr u32 X_AT = 0;
constexpr u32 WORDS_AT = X_AT + SLOTS * TILES * X_BYTES;  // [group][slot][tile], as are the exponents
constexpr u32 EXPONENTS_AT = WORDS_AT + GROUPS * SLOTS * TILES * WORD_BYTES;
constexpr u32 FULL_AT = EXPONENTS_AT + GROUPS * SLOTS * TILES * EXPONENT_BYTES;
constexpr u32 EMPTY_AT = FULL_AT + SLOTS * 8;

__device__ __forceinline__ void copy(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void copy_x(u32 target, const TensorMap* map, u32 k, u32 m, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          target),
      "l"(map), "r"(k), "r"(m), "r"(barrier)
      : "memory");
}

// Eight codes of a word to the left operand of one product: a turn of the word and a mask put sign and magnitude of one
// column in each half word (packing.BITS says where they lie). scales: of row n in the lower half, n + 8 in the upper.
__device__ __forceinline__ void decode(u32 word, u32 scales, u32* operand) {
  asm volatile(
      "{\n.reg .b32 x0, x1, x2, x3, x4, upper, lower;\n.reg .b16 n, n_8;\n"
      "mov.b32 {n, n_8}, %5;\nmov.b32 upper, {n, n};\nmov.b32 lower, {n_8, n_8};\n"
      "shl.b32 x0, %4, 2;\nand.b32 x0, x0, 0x81C081C0;\n"
      "shl.b32 x1, %4, 6;\nand.b32 x1, x1, 0x81C081C0;\n"
      "shf.l.wrap.b32 x2, %4, %4, 12;\nand.b32 x2, x2, 0x81C081C0;\n"
      "and.b32 x3, %4, 0x81808180;\nshr.b32 x4, %4, 8;\nlop3.b32 x3, x4, 0x00400040, x3, 0xEA;\n"
      "mul.bf16x2 %0, x0, upper;\nmul.bf16x2 %1, x1, lower;\nmul.bf16x2 %2, x2, upper;\nmul.bf16x2 %3, x3, lower;\n}"
      : "=r"(operand[0]), "=r"(operand[1]), "=r"(operand[2]), "=r"(operand[3])
      : "r"(word), "r"(scales));
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

// Weights are constant while products run, so a ring's worth of them is fetched while kernels before this one still run,
// as long as those that start others early (griddepcontrol) write no weights; x after their end.
// first_m: of the block. Rows past the weight's last tile are its last tile's again, which nobody stores.
__device__ __forceinline__ void fetch(const TensorMap* x_map, const u32* words, const u32* exponents, u32 memory,
                                      u32 first_m, u32 row_tile, u32 row_tiles, u32 column_tiles) {
  auto copy_weight = [&](const Place& place, u32 tile) {
    u32 full = memory + FULL_AT + place.slot * 8;
    expect(full, TILES * (X_BYTES + GROUPS * (WORD_BYTES + EXPONENT_BYTES)));
#pragma unroll
    for (u32 group = 0; group < GROUPS; ++group) {
      u64 first = u64(min(row_tile + group, row_tiles - 1)) * column_tiles + tile;
      u32 slot = (group * SLOTS + place.slot) * TILES;
      copy(memory + WORDS_AT + slot * WORD_BYTES, words + first * (WORD_BYTES / 4), TILES * WORD_BYTES, full);
      copy(memory + EXPONENTS_AT + slot * EXPONENT_BYTES, exponents + first * (EXPONENT_BYTES / 4),
           TILES * EXPONENT_BYTES, full);
    }
  };
  auto copy_rows = [&](const Place& place, u32 tile) {
#pragma unroll
    for (u32 i = 0; i < TILES; ++i)
      copy_x(memory + X_AT + (place.slot * TILES + i) * X_BYTES, x_map, (tile + i) * 64, first_m,
             memory + FULL_AT + place.slot * 8);
  };
  const u32 ahead = min(column_tiles, SLOTS * TILES);
  Place place, filled;
  for (u32 tile = 0; tile < ahead; tile += TILES, filled.advance()) copy_weight(filled, tile);
  asm volatile("griddepcontrol.wait;" ::: "memory");  // for all that ran before on the stream
  for (u32 tile = 0; tile < ahead; tile += TILES, place.advance()) copy_rows(place, tile);
  for (u32 tile = ahead; tile < column_tiles; tile += TILES, place.advance()) {
    wait(memory + EMPTY_AT + place.slot * 8, place.parity ^ 1);
    copy_weight(place, tile);
    copy_rows(place, tile);
  }
}

// Sums, rounded, to y by way of the group's words in shared memory, 64 rows of x at a time: a store is 16 bytes.
__device__ __forceinline__ void store(const float* sums, u32 group, u32 memory, unsigned short* y, u32 first_n,
                                      u32 first_m, u32 rows, u32 outputs) {
  const u32 thread = threadIdx.x & 127, warp = thread / 32, lane = thread & 31;
  const u32 staged = memory + WORDS_AT + group * SLOTS * TILES * WORD_BYTES;
  constexpr u32 PART = ROWS < 64 ? ROWS : 64;
#pragma unroll
  for (u32 first = 0; first < ROWS; first += PART) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");  // all have read what lay there
#pragma unroll
    for (u32 m = 0; m < PART && first + m < ROWS; m += 16) {
      u32 values[4];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const float* pair = sums + (first + m) / 2 + 2 * i;
        asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(values[i]) : "f"(pair[1]), "f"(pair[0]));
      }
      // Four matrices (n, n + 8) x (m, m + 8), turned: eight outputs of one row of x are 16 bytes.
      u32 row = m + lane / 16 * 8 + (lane & 7), part = warp * 2 + (lane >> 3 & 1);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       staged + row * 128 + (part ^ row & 7) * 16),
                   "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3])
                   : "memory");
    }
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
    for (u32 row = thread / 8; row < PART && first + row < ROWS; row += 16) {
      u32 m = first_m + first + row, n = first_n + thread % 8 * 8;
      u32 part[4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(part[0]), "=r"(part[1]), "=r"(part[2]), "=r"(part[3])
                   : "r"(staged + row * 128 + (thread % 8 ^ row & 7) * 16)
                   : "memory");
      if (m >= rows) continue;
      unsigned short* target = y + u64(m) * outputs + n;
      if (outputs % 8 == 0) {
        if (n < outputs) *reinterpret_cast<uint4*>(target) = make_uint4(part[0], part[1], part[2], part[3]);
      } else {
#pragma unroll
        for (u32 i = 0; i < 8; ++i)
          if (n + i < outputs) target[i] = part[i / 2] >> i % 2 * 16;
      }
    }
  }
}

__device__ __forceinline__ void multiply_rows(u32 group, u32 memory, unsigned short* y, u32 first_n, u32 first_m,
                                              u32 rows, u32 outputs, u32 column_tiles) {
  const u32 thread = threadIdx.x & 127, lane = thread & 31;
  const u32 words_at = memory + WORDS_AT + group * SLOTS * TILES * WORD_BYTES + thread * 16;
  const u32 exponents_at = memory + EXPONENTS_AT + group * SLOTS * TILES * EXPONENT_BYTES + thread / 4 * 4;
  float sums[ROWS / 2];
#pragma unroll
  for (u32 i = 0; i < ROWS / 2; ++i)  // not moved past the fence that makes them the products' own
    asm volatile("mov.f32 %0, 0f00000000;" : "=f"(sums[i]));

  u32 operands[SETS][4][4];
  u32 words[2][4], exponents[2];  // of an even tile and of an odd one
  auto load = [&](u32 slot, u32 tile, u32 odd) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[odd][0]), "=r"(words[odd][1]), "=r"(words[odd][2]), "=r"(words[odd][3])
                 : "r"(words_at + (slot * TILES + tile) * WORD_BYTES)
                 : "memory");
    asm volatile("ld.shared.b32 %0, [%1];"
                 : "=r"(exponents[odd])
                 : "r"(exponents_at + (slot * TILES + tile) * EXPONENT_BYTES)
                 : "memory");
  };
  auto decode_quarter = [&](u32 tile, u32 quarter) {
    // Bytes are (row n, n + 8) x (half of the columns); an exponent seven bits up is a power of two in bf16.
    const u32 odd = tile % 2;
    u32 scales = (quarter < 2 ? exponents[odd] << 7 : exponents[odd] >> 1) & 0x7F807F80;
    decode(words[odd][quarter], scales, operands[tile % SETS][quarter]);
  };

  // Words are loaded two tiles ahead of their products and decoded one tile ahead.
  Place place, ahead;
  wait(memory + FULL_AT, 0);
  load(0, 0, 0);
  if (TILES == 1) {
    ahead.advance();
    wait(memory + FULL_AT + ahead.slot * 8, ahead.parity);
  }
  load(ahead.slot, 1 % TILES, 1);
#pragma unroll
  for (u32 quarter = 0; quarter < 4; ++quarter) decode_quarter(0, quarter);
  const u64 x_at = descriptor(memory + X_AT);
  u32 last_slot = 0;  // of the tile before
  bool ready = false;
#pragma unroll 1
  for (u32 first = 0; first < column_tiles; first += 4) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      if ((i + 2) % TILES == 0) {
        ahead.advance();
        wait(memory + FULL_AT + ahead.slot * 8, ahead.parity, !ready && first + i + 2 < column_tiles);
      }
      load(ahead.slot, (i + 2) % TILES, i % 2);  // past the last tile, words that nobody multiplies
      if ((i + 3) % TILES == 0) {
        Place next = ahead;
        next.advance();
        ready = passed(memory + FULL_AT + next.slot * 8, next.parity);
      }
      u64 x = x_at + (place.slot * TILES + i % TILES) * (X_BYTES / 16);
      constexpr u32 PART = SETS == 2 ? 4 : 2;  // of the four products of a tile
#pragma unroll
      for (u32 part = 0; part < 4; part += PART) {
        multiply_fence();
#pragma unroll
        for (u32 q = part; q < part + PART; ++q) multiply(sums, operands[i % SETS][q], x + q * 2);
        multiply_commit();
        if (SETS == 2) multiply_wait<1>();
#pragma unroll
        for (u32 q = part; q < part + PART; ++q) decode_quarter(i + 1, q);
      }
      if (SETS == 4) multiply_wait<2>();
      // The products of the tile before are done.
      if (i % TILES == 0) arrive(memory + EMPTY_AT + last_slot * 8, lane == 0 && first + i > 0);
      if (i % TILES == TILES - 1) {
        last_slot = place.slot;
        place.advance();
      }
    }
  }
  multiply_wait<0>();
  store(sums, group, memory, y, first_n, first_m, rows, outputs);
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), RESIDENT)
    mxfp4_mm(const __grid_constant__ TensorMap x_map, const u32* words, const u32* exponents, unsigned short* y,
             u32 rows, u32 outputs, u32 column_tiles) {
  const u32 memory = shared_base();
  // A product that follows on the stream may take its place on the multiprocessors as soon as blocks leave them.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // Blocks that share rows of the weight are neighbours, so that memory is read once.
  const u32 first_m = blockIdx.x * ROWS, row_tile = blockIdx.y * GROUPS;
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
      fetch(&x_map, words, exponents, memory, first_m, row_tile, (outputs + 63) / 64, column_tiles);
  } else {
    if (RESIDENT == 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 1 ? 232 : 240));
    multiply_rows(group, memory, y, (row_tile + group) * 64, first_m, rows, outputs, column_tiles);
  }
}
