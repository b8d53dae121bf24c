/* Blocks in read() of descriptor 0, below functions whose frames are made in every way; writes "ready" before. */
#include <alloca.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

volatile int sink;

__attribute__((noinline)) void waits_here(void) {
  char buffer[8];
  sink += write(1, "ready\n", 6);
  sink += read(0, buffer, sizeof buffer);
  sink++;
}

__attribute__((noinline)) void has_alloca(int size) {
  char *memory = alloca(size);
  memset(memory, 1, size);
  waits_here();
  sink += memory[size / 2];
}

__attribute__((noinline)) void has_large_frame(void) {
  char memory[5000];
  memset(memory, 1, sizeof memory);
  has_alloca(1000);
  sink += memory[sink & 15];
}

__attribute__((noinline)) void recurses(int depth) {
  if (depth)
    recurses(depth - 1);
  else
    has_large_frame();
  sink++;
}

static void on_signal(int number) {
  recurses(3);
  sink += number;
}

__attribute__((noinline)) void raises_signal(void) {
  signal(SIGUSR1, on_signal);
  raise(SIGUSR1);
  sink++;
}

static void *in_thread(void *argument) {
  recurses(2);
  sink++;
  return argument;
}

__attribute__((noinline)) void through_pointer(void (*function)(int), int argument) {
  function(argument);
  sink++;
}

static void *in_large_thread(void *argument) {
  has_alloca(300000);
  sink++;
  return argument;
}

int main(int count, char **arguments) {
  if (count < 2)
    return 2;
  if (!strcmp(arguments[1], "thread")) {
    pthread_t thread;
    pthread_create(&thread, 0, in_thread, 0);
    pthread_join(thread, 0);
  } else if (!strcmp(arguments[1], "threads")) {
    pthread_t thread;
    for (int number = 0; number < 300; number++)
      pthread_create(&thread, 0, in_large_thread, 0);
    pthread_join(thread, 0);
  } else if (!strcmp(arguments[1], "signal")) {
    raises_signal();
  } else if (!strcmp(arguments[1], "plain")) {
    waits_here();
  } else {
    through_pointer(recurses, atoi(arguments[1]));
  }
  return sink == 0;
}
