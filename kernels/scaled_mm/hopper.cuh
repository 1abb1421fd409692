// What kernels for Hopper (sm_90a) share: barriers, copies, products and the gate, in the words of PTX.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
  u64 opaque[16];
};

__device__ __forceinline__ u32 shared_base() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return static_cast<u32>(__cvta_generic_to_shared(memory));
}

__device__ __forceinline__ void init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Branches are within the text: one that the compiler sees amid products in flight makes it wait for each of them.
__device__ __forceinline__ void wait(u32 barrier, u32 parity, bool needed = true) {
  asm volatile(
      "{\n.reg .pred done;\nsetp.eq.u32 done, %2, 0;\n@done bra over;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\nover:\n}" ::"r"(barrier),
      "r"(parity), "r"(u32(needed))
      : "memory");
}

// Whether the phase is over. Asked ahead of time, since an answer takes as long as decoding a quarter of a tile.
__device__ __forceinline__ bool passed(u32 barrier, u32 parity) {
  u32 result;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
      : "=r"(result)
      : "r"(barrier), "r"(parity)
      : "memory");
  return result;
}

__device__ __forceinline__ void arrive(u32 barrier, bool speaks) {
  asm volatile(
      "{\n.reg .pred speaks;\nsetp.ne.u32 speaks, %1, 0;\n"
      "@speaks mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
      "r"(u32(speaks))
      : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// True in one lane of a warp. From this instruction the compiler knows that it is one, and needs no loop over lanes.
__device__ __forceinline__ bool elected() {
  u32 result;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(result));
  return result;
}

#define TEXT(x) #x
#define EXPANDED_TEXT(x) TEXT(x)

__device__ __forceinline__ void multiply_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void multiply_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Rows of 128 bytes, swizzled; 1024 bytes from eight rows to the next.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return u64(1) << 62 | u64(64) << 32 | 1 << 16 | address >> 4;
}

// silu(gate) * up of both values rounded to bf16, as kernels/rows/kernel.py computes it, instruction by instruction.
__device__ __forceinline__ float gated(float gate, float up) {
  float y;
  asm volatile(
      "{\n.reg .f32 g, u, e;\n.reg .b16 h;\n"
      "cvt.rn.bf16.f32 h, %1;\ncvt.f32.bf16 g, h;\ncvt.rn.bf16.f32 h, %2;\ncvt.f32.bf16 u, h;\n"
      "neg.f32 e, g;\nmul.f32 e, e, 0f3FB8AA3B;\nex2.approx.f32 e, e;\nadd.f32 e, e, 0f3F800000;\n"
      "div.full.f32 e, g, e;\nmul.f32 %0, e, u;\n}"
      : "=f"(y)
      : "f"(gate), "f"(up));
  return y;
}
