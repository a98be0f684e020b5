// Captures kernels, a copy and a graph allocation into a CUDA graph, replays it and checks the sum.
#include "check.h"

__global__ void add(int* p, int n, int by) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) p[i] += by;
}

int main() {
  const int n = 1 << 20, rounds = 1000;
  int *data, *copy;
  CHECK(cudaMalloc(&data, n * sizeof(int)));
  CHECK(cudaMalloc(&copy, n * sizeof(int)));
  CHECK(cudaMemset(data, 0, n * sizeof(int)));
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  add<<<256, 256, 0, stream>>>(data, n, 1);
  void* scratch;
  CHECK(cudaMallocAsync(&scratch, 16 * MIB, stream));
  CHECK(cudaMemsetAsync(scratch, 0, 16 * MIB, stream));
  CHECK(cudaFreeAsync(scratch, stream));
  CHECK(cudaMemcpyAsync(copy, data, n * sizeof(int), cudaMemcpyDeviceToDevice, stream));
  CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec;
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < rounds; i++) CHECK(cudaGraphLaunch(exec, stream));
  CHECK(cudaStreamSynchronize(stream));
  int last;
  CHECK(cudaMemcpy(&last, copy + n - 1, sizeof last, cudaMemcpyDeviceToHost));
  printf("graph rounds %d value %d\n", rounds, last);
  return last == rounds ? 0 : 1;
}
