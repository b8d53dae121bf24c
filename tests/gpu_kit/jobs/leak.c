// SPDX-License-Identifier: Apache-2.0
/*
 * Allocates GPU memory at two places, of which one does not free it: leak LIBCUDART TIMES BYTES.
 *
 * Prints the file offsets of the function that leaks, "@{...}", and obeys lines as jobs/lines.py says: "run" does it
 * all once, "exit" ends.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int (*malloc_function)(void **, size_t);
typedef int (*free_function)(void *);

static malloc_function allocate;
static free_function release;

__attribute__((noinline, noclone)) int leaks(size_t bytes)
{
	void *pointer;
	int result = allocate(&pointer, bytes);

	/* No tail call: the return address is in this function. */
	__asm__ volatile("" ::: "memory");
	return result;
}

__attribute__((noinline, noclone)) int frees(size_t bytes)
{
	void *pointer;
	int result = allocate(&pointer, bytes);

	__asm__ volatile("" ::: "memory");
	return result ? result : release(pointer);
}

int main(int argc, char **argv)
{
	char line[256];
	void *cuda;
	Dl_info here;
	int i, result = 0;

	if (argc != 4 || !(cuda = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL))) {
		printf("@{\"missing\": \"no libcudart at that path\"}\n");
		return 0;
	}
	allocate = (malloc_function)dlsym(cuda, "cudaMalloc");
	release = (free_function)dlsym(cuda, "cudaFree");
	dladdr((void *)leaks, &here);
	printf("@{\"ready\": true, \"begin\": %lu, \"end\": %lu, \"pid\": %d}\n",
	       (unsigned long)((char *)leaks - (char *)here.dli_fbase),
	       (unsigned long)((char *)frees - (char *)here.dli_fbase), getpid());
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin) && strncmp(line, "exit", 4)) {
		for (i = 0; i < atoi(argv[2]) && !result; i++) {
			result = leaks(strtoul(argv[3], NULL, 0));
			if (!result)
				result = frees(strtoul(argv[3], NULL, 0));
		}
		printf("@{\"result\": %d}\n", result);
		fflush(stdout);
	}
	return 0;
}
