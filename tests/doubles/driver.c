/* A double of the parts of CUDA's driver in which threads wait for each other, as public reports have it:
 * cuLibraryLoadData keeps the lock of the context, and cudaMemcpyAsync wants it (meta-pytorch/torchcomms#2334). */
#include <pthread.h>
#include <unistd.h>

static pthread_mutex_t context = PTHREAD_MUTEX_INITIALIZER;

int cuLibraryLoadData(void)
{
    pthread_mutex_lock(&context);
    for (;;)
        pause();
}

int cudaMemcpyAsync(void)
{
    pthread_mutex_lock(&context);
    pthread_mutex_unlock(&context);
    return 0;
}

int driver_is_locked(void)
{
    if (pthread_mutex_trylock(&context))
        return 1;
    pthread_mutex_unlock(&context);
    return 0;
}
