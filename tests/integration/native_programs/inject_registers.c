// Fills general and vector registers, counts for a while, and looks whether they hold the same values: until stdin ends.
// Prints "ready", and at the end how many rounds it took and how many found another value.
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static double expected[16][4], found[16][4];

static int round_of(unsigned long *general) {
  unsigned long wrong = 0;
  __asm__ volatile(
      "vmovupd 0x000(%[in]), %%ymm0\n vmovupd 0x020(%[in]), %%ymm1\n vmovupd 0x040(%[in]), %%ymm2\n"
      "vmovupd 0x060(%[in]), %%ymm3\n vmovupd 0x080(%[in]), %%ymm4\n vmovupd 0x0a0(%[in]), %%ymm5\n"
      "vmovupd 0x0c0(%[in]), %%ymm6\n vmovupd 0x0e0(%[in]), %%ymm7\n vmovupd 0x100(%[in]), %%ymm8\n"
      "vmovupd 0x120(%[in]), %%ymm9\n vmovupd 0x140(%[in]), %%ymm10\n vmovupd 0x160(%[in]), %%ymm11\n"
      "vmovupd 0x180(%[in]), %%ymm12\n vmovupd 0x1a0(%[in]), %%ymm13\n vmovupd 0x1c0(%[in]), %%ymm14\n"
      "vmovupd 0x1e0(%[in]), %%ymm15\n"
      "mov $0x1111, %%r8\n mov $0x2222, %%r9\n mov $0x3333, %%r10\n mov $0x4444, %%r11\n mov $0x5555, %%rax\n"
      "mov $0x6666, %%rdx\n mov $2000000, %%ecx\n"
      // The red zone below the stack belongs to this function, too.
      "movq $0x7777, -8(%%rsp)\n movq $0x8888, -128(%%rsp)\n"
      "1: stc\n jnc 2f\n dec %%ecx\n jnz 1b\n jmp 3f\n"
      "2: inc %[wrong]\n"
      "3: cmp $0x1111, %%r8\n jne 4f\n cmp $0x2222, %%r9\n jne 4f\n cmp $0x3333, %%r10\n jne 4f\n"
      "cmp $0x4444, %%r11\n jne 4f\n cmp $0x5555, %%rax\n jne 4f\n cmp $0x6666, %%rdx\n jne 4f\n"
      "cmpq $0x7777, -8(%%rsp)\n jne 4f\n cmpq $0x8888, -128(%%rsp)\n je 5f\n"
      "4: inc %[wrong]\n"
      "5: vmovupd %%ymm0, 0x000(%[out])\n vmovupd %%ymm1, 0x020(%[out])\n vmovupd %%ymm2, 0x040(%[out])\n"
      "vmovupd %%ymm3, 0x060(%[out])\n vmovupd %%ymm4, 0x080(%[out])\n vmovupd %%ymm5, 0x0a0(%[out])\n"
      "vmovupd %%ymm6, 0x0c0(%[out])\n vmovupd %%ymm7, 0x0e0(%[out])\n vmovupd %%ymm8, 0x100(%[out])\n"
      "vmovupd %%ymm9, 0x120(%[out])\n vmovupd %%ymm10, 0x140(%[out])\n vmovupd %%ymm11, 0x160(%[out])\n"
      "vmovupd %%ymm12, 0x180(%[out])\n vmovupd %%ymm13, 0x1a0(%[out])\n vmovupd %%ymm14, 0x1c0(%[out])\n"
      "vmovupd %%ymm15, 0x1e0(%[out])\n"
      : [wrong] "+r"(wrong)
      : [in] "r"(expected), [out] "r"(found)
      : "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5",
        "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
  *general += wrong;
  return memcmp(expected, found, sizeof expected) != 0;
}

int main(void) {
  unsigned long rounds = 0, general = 0, vectors = 0;
  struct pollfd end = {.fd = 0, .events = POLLIN};
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 4; j++)
      expected[i][j] = 100.0 * i + j + 0.25;
  puts("ready");
  fflush(stdout);
  do {
    vectors += round_of(&general);
    rounds++;
  } while (poll(&end, 1, 0) == 0);
  printf("%lu %lu %lu\n", rounds, general, vectors);
  return 0;
}
