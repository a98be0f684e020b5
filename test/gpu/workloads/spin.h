// A kernel that fills the GPU and whose length is an amount of work, not of time: who gets half of the GPU takes twice as
// long for it. share.cu and latency.cu are made of it. Its progress can be read while it runs, preempted or not.
#pragma once
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>
#include "check.h"

// What the GPU tells the CPU and the CPU tells the GPU, in mapped host memory: no driver call is needed to read it.
struct Board {
  volatile unsigned long long done;  // iterations
  volatile int stop;                 // ends kernels of several chunks after the chunk at hand
};
// The GPU's own side.
struct State {
  volatile unsigned long long done;
  unsigned long long count;   // chunks that blocks have done, of kernels with several
  volatile unsigned last;     // chunk after which the kernel ends
  volatile unsigned arrived;  // blocks at the end of a chunk, of all chunks so far (cooperative launch)
  volatile float sink;
};
struct Job {
  unsigned chunks, iterations;  // of every thread; iterations of each chunk
  unsigned long long credit;    // iterations to report after each chunk; 0: nothing
  int together;                 // all blocks wait for each other after each chunk (cooperative launch)
  State* state;
  Board* board;
};

// Blocks wait for each other. They must all be on the GPU at once, which a cooperative launch grants.
__device__ void meet(State* state, unsigned chunk) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd((unsigned*)&state->arrived, 1u);
    while (state->arrived < (chunk + 1) * gridDim.x) {}
    __threadfence();
  }
  __syncthreads();
}

__global__ void spin(Job job) {
  const bool first = blockIdx.x == 0 && threadIdx.x == 0;
  float a = threadIdx.x * 1e-3f;
  for (unsigned i = 0; i < job.chunks; i++) {
    for (unsigned k = 0; k < job.iterations; k++) {
      a = a * 0.9999f + 0.5f;
      a = a * 0.9999f + 0.25f;
    }
    // Never true for the others, but the compiler cannot know, and so may not drop their loop or move it down.
    if (first || a == -1.f) job.state->sink = a;
    if (job.credit && job.chunks > 1) {
      // An SM prefers its oldest warps: the first block is done after a quarter of the time. So all blocks count.
      if (threadIdx.x == 0) {
        unsigned long long n = atomicAdd(&job.state->count, 1ull) + 1;
        if (n % gridDim.x == 0) {
          job.board->done = n / gridDim.x * job.credit;
          if (job.board->stop) job.state->last = 0;
        }
      }
    } else if (first && job.credit) {
      unsigned long long done = job.state->done + job.credit;
      job.state->done = done;
      job.board->done = done;
    }
    if (i + 1 == job.chunks) break;
    if (job.together) meet(job.state, i);
    if (job.state->last <= i) break;
  }
}

struct Gpu {
  static const int threads = 256;
  int blocks = 0;
  cudaStream_t stream = nullptr;
  State* state = nullptr;
  Board *board = nullptr, *mapped = nullptr;  // the same, as the CPU and as the GPU sees it

  explicit Gpu(unsigned flags) {
    CHECK(cudaSetDeviceFlags(flags | cudaDeviceMapHost));
    int each, processors;
    CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, spin, threads, 0));
    blocks = each * processors;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc((void**)&state, sizeof(State)));
    CHECK(cudaHostAlloc((void**)&board, sizeof(Board), cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer((void**)&mapped, board, 0));
    reset();
    run(1, 100, 100);  // the kernel is loaded by its first launch
    CHECK(cudaStreamSynchronize(stream));
    reset();
  }
  void reset() {
    memset((void*)board, 0, sizeof *board);
    CHECK(cudaMemsetAsync((void*)state, 0, sizeof *state, stream));
    CHECK(cudaMemsetAsync((void*)&state->last, 0xff, sizeof state->last, stream));
    CHECK(cudaStreamSynchronize(stream));
  }
  void run(unsigned chunks, unsigned iterations, unsigned long long credit, bool together = false) {
    Job job = {chunks, iterations, credit, together, state, mapped};
    void* arguments[] = {&job};
    const void* kernel = (const void*)spin;
    if (together) {
      CHECK(cudaMemsetAsync((void*)&state->arrived, 0, sizeof state->arrived, stream));
      CHECK(cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(threads), arguments, 0, stream));
    } else {
      CHECK(cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), arguments, 0, stream));
    }
  }
  // Iterations per microsecond, with the GPU to ourselves. Of two lengths, so that what a launch costs falls out.
  double calibrate() {
    const unsigned iterations = 50000;
    double begin = now_s(), best = 0;
    while (now_s() - begin < 0.5) {  // clocks go up
      run(10, iterations, iterations);
      CHECK(cudaStreamSynchronize(stream));
    }
    for (int round = 0; round < 3; round++) {
      double took[2];
      for (int i = 0; i < 2; i++) {
        begin = now_s();
        run(100 * (i + 1), iterations, iterations);
        CHECK(cudaStreamSynchronize(stream));
        took[i] = now_s() - begin;
      }
      double rate = 100.0 * iterations / ((took[1] - took[0]) * 1e6);
      if (rate > best) best = rate;
    }
    return best;
  }
};

static inline double epoch() {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
static inline void sleep_until(double when) {
  timespec t;
  t.tv_sec = (time_t)when;
  t.tv_nsec = (long)((when - t.tv_sec) * 1e9);
  while (clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &t, nullptr)) {}
}

// --name value …; a name alone is "1". Names that nobody knows are an error.
struct Options {
  std::map<std::string, std::string> values;

  void take(const std::vector<std::string>& words, const char* known) {
    for (size_t i = 0; i < words.size(); i++) {
      const std::string& w = words[i];
      if (w.compare(0, 2, "--") || (std::string(" ") + known + " ").find(" " + w.substr(2) + " ") == std::string::npos) {
        fprintf(stderr, "%s: no such option; want --(%s)\n", w.c_str(), known);
        exit(2);
      }
      bool alone = i + 1 == words.size() || !words[i + 1].compare(0, 2, "--");
      values[w.substr(2)] = alone ? "1" : words[++i];
    }
  }
  void take_line(const char* line, const char* known) {
    std::vector<std::string> words;
    for (const char* p = line; *(p += strspn(p, " \t\n"));) {
      size_t n = strcspn(p, " \t\n");
      words.emplace_back(p, n);
      p += n;
    }
    take(words, known);
  }
  bool has(const char* name) const { return values.count(name) != 0; }
  std::string text(const char* name, const char* otherwise) const { return has(name) ? values.at(name) : otherwise; }
  double number(const char* name, double otherwise) const { return has(name) ? atof(values.at(name).c_str()) : otherwise; }
};
