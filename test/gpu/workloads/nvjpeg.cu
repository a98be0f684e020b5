// nvJPEG: a picture of one colour (nvjpeg.h), decoded by the GPU's own JPEG engine where it has one, else by kernels; its pixels are
// compared. Build: nvcc nvjpeg.cu -lnvjpeg
#include <nvjpeg.h>

#include "check.h"
#include "nvjpeg.h"

#define JPEG(call)                                                                             \
  do {                                                                                         \
    nvjpegStatus_t s_ = (call);                                                                \
    if (s_ != NVJPEG_STATUS_SUCCESS) {                                                         \
      fprintf(stderr, "%s:%d: %s: nvjpegStatus %d\n", __FILE__, __LINE__, #call, s_);          \
      exit(1);                                                                                 \
    }                                                                                          \
  } while (0)

int main() {
  enum { SIDE = 64 };
  report_memory();
  nvjpegHandle_t handle;
  bool engine = nvjpegCreateEx(NVJPEG_BACKEND_HARDWARE, nullptr, nullptr, 0, &handle) == NVJPEG_STATUS_SUCCESS;
  if (!engine) JPEG(nvjpegCreateEx(NVJPEG_BACKEND_DEFAULT, nullptr, nullptr, 0, &handle));
  nvjpegJpegState_t state;
  JPEG(nvjpegJpegStateCreate(handle, &state));
  unsigned char *pixels, host[SIDE * SIDE * 3];
  CHECK(cudaMalloc(&pixels, sizeof host));
  nvjpegImage_t image = {};
  image.channel[0] = pixels;
  image.pitch[0] = SIDE * 3;
  const unsigned char *data = picture;
  size_t length = sizeof picture;
  JPEG(nvjpegDecodeBatchedInitialize(handle, state, 1, 1, NVJPEG_OUTPUT_RGBI));
  JPEG(nvjpegDecodeBatched(handle, state, &data, &length, &image, 0));
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(host, pixels, sizeof host, cudaMemcpyDeviceToHost));
  int wrong = 0;
  for (int i = 0; i < SIDE * SIDE; i++)
    for (int c = 0; c < 3; c++) wrong += abs(host[i * 3 + c] - (const int[]){0x30, 0x70, 0xc0}[c]) > 4;
  printf("engine %d pixels right %d\n", engine, wrong == 0);
  return wrong != 0;
}
