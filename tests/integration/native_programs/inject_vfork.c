// A child of vfork that waits for its end: the parent stands in the kernel until then.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

void hold(void) {
  pid_t pid = vfork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;)
      pause();
  }
  waitpid(pid, 0, 0);
}
