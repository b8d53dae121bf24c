/* Two chains of functions at whose end the thread sleeps for a moment. */
#include <unistd.h>

volatile int sink;

__attribute__((noinline)) void a_inner(int microseconds) {
  usleep(microseconds);
  sink++;
}
__attribute__((noinline)) void a_outer(int microseconds) {
  a_inner(microseconds);
  sink++;
}
__attribute__((noinline)) void b_inner(int microseconds) {
  char memory[2000];
  memory[sink & 1023] = 1;
  usleep(microseconds);
  sink += memory[sink & 1023];
}
__attribute__((noinline)) void b_middle(int microseconds) {
  b_inner(microseconds);
  sink++;
}
__attribute__((noinline)) void b_outer(int microseconds) {
  b_middle(microseconds);
  sink++;
}
