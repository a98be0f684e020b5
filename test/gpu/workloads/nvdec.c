// NVDEC: what the decoder can, six frames of H.264 (nvdec.h) decoded and compared with what they must be, memory.
//   nvdec          the frames alone
//   nvdec fill N   and decoders of 4096 x 4096 with 16 surfaces each until one is refused, N at most; the frames are then decoded again
// Exit status 3: no library, 4: no decoder for H.264. Build: cc -o nvdec nvdec.c, with Debian's libffmpeg-nvenc-dev
#include <dlfcn.h>
#include <ffnvcodec/dynlink_cuda.h>
#include <ffnvcodec/dynlink_nvcuvid.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvdec.h"

#define CHECK(call)                                                              \
	do {                                                                         \
		CUresult r_ = (call);                                                    \
		if (r_ != CUDA_SUCCESS) {                                                \
			fprintf(stderr, "%s:%d: %s: CUresult %d\n", __FILE__, __LINE__, #call, r_); \
			exit(1);                                                             \
		}                                                                        \
	} while (0)
#define EACH(f)                                                                                                             \
	f(cuda, cuInit) f(cuda, cuDeviceGet) f(cuda, cuCtxCreate_v2) f(cuda, cuMemcpyDtoH_v2) f(video, cuvidGetDecoderCaps)     \
	f(video, cuvidCreateDecoder) f(video, cuvidDestroyDecoder) f(video, cuvidDecodePicture) f(video, cuvidMapVideoFrame64)  \
	f(video, cuvidUnmapVideoFrame64) f(video, cuvidCreateVideoParser) f(video, cuvidParseVideoData) f(video, cuvidDestroyVideoParser)
#define DECLARE(library, name) static t##name *p_##name;
EACH(DECLARE)
static CUresult(CUDAAPI *p_cuMemGetInfo_v2)(size_t *, size_t *);

static CUvideodecoder decoder;
static int shown, right, surfaces;

static void *library(const char *name) {
	void *l = dlopen(name, RTLD_NOW);
	if (!l) {
		fprintf(stderr, "%s\n", dlerror());
		exit(3);
	}
	return l;
}

static void *symbol(void *from, const char *name) {
	void *s = dlsym(from, name);
	if (!s) {
		fprintf(stderr, "no %s\n", name);
		exit(3);
	}
	return s;
}

static CUresult create(CUvideodecoder *made, int width, int height, int count) {
	CUVIDDECODECREATEINFO i = {.ulWidth = width, .ulHeight = height, .ulNumDecodeSurfaces = count, .CodecType = cudaVideoCodec_H264,
		.ChromaFormat = cudaVideoChromaFormat_420, .ulCreationFlags = cudaVideoCreate_PreferCUVID, .OutputFormat = cudaVideoSurfaceFormat_NV12,
		.display_area = {0, 0, width, height}, .ulTargetWidth = width, .ulTargetHeight = height, .ulNumOutputSurfaces = 1, .ulMaxWidth = width, .ulMaxHeight = height};
	return p_cuvidCreateDecoder(made, &i);
}

static int CUDAAPI on_sequence(void *user, CUVIDEOFORMAT *f) {
	(void)user;
	surfaces = f->min_num_decode_surfaces;
	CHECK(create(&decoder, f->coded_width, f->coded_height, surfaces));
	return surfaces;
}

static int CUDAAPI on_picture(void *user, CUVIDPICPARAMS *p) {
	(void)user;
	CHECK(p_cuvidDecodePicture(decoder, p));
	return 1;
}

static int CUDAAPI on_display(void *user, CUVIDPARSERDISPINFO *d) {
	static unsigned char luma[4096 * HEIGHT];
	(void)user;
	if (!d) return 1; // the end
	CUVIDPROCPARAMS p = {.progressive_frame = d->progressive_frame, .top_field_first = d->top_field_first};
	unsigned long long frame = 0;
	unsigned pitch = 0, sum = 0;
	CHECK(p_cuvidMapVideoFrame64(decoder, d->picture_index, &frame, &pitch, &p));
	if (pitch > 4096) exit(1);
	CHECK(p_cuMemcpyDtoH_v2(luma, frame, (size_t)pitch * HEIGHT));
	CHECK(p_cuvidUnmapVideoFrame64(decoder, frame));
	for (int y = 0; y < HEIGHT; y++)
		for (int x = 0; x < WIDTH; x++) sum = sum * 31 + luma[y * pitch + x];
	if (shown < FRAMES && sum == sums[shown]) right++;
	else printf("frame %d has sum %#x\n", shown, sum);
	shown++;
	return 1;
}

static void decode(void) {
	CUVIDPARSERPARAMS p = {.CodecType = cudaVideoCodec_H264, .ulMaxNumDecodeSurfaces = 1, .ulMaxDisplayDelay = 1,
		.pfnSequenceCallback = on_sequence, .pfnDecodePicture = on_picture, .pfnDisplayPicture = on_display};
	CUvideoparser parser;
	shown = right = 0;
	CHECK(p_cuvidCreateVideoParser(&parser, &p));
	CUVIDSOURCEDATAPACKET data = {.payload_size = sizeof stream, .payload = stream, .flags = CUVID_PKT_ENDOFSTREAM};
	CHECK(p_cuvidParseVideoData(parser, &data));
	CHECK(p_cuvidDestroyVideoParser(parser));
	if (decoder) CHECK(p_cuvidDestroyDecoder(decoder));
	printf("frames %d right %d surfaces %d\n", shown, right, surfaces);
	fflush(stdout);
	if (shown != FRAMES || right != FRAMES) exit(1);
}

static void report_memory(void) {
	size_t left = 0, total = 0;
	CHECK(p_cuMemGetInfo_v2(&left, &total));
	printf("total_MiB %zu free_MiB %zu\n", total >> 20, left >> 20);
}

int main(int argc, char **argv) {
	void *cuda = library("libcuda.so.1"), *video = library("libnvcuvid.so.1");
#define LOOK_UP(library, name) p_##name = (t##name *)symbol(library, #name);
	EACH(LOOK_UP)
	p_cuMemGetInfo_v2 = symbol(cuda, "cuMemGetInfo_v2");
	CUdevice device;
	CUcontext context;
	CHECK(p_cuInit(0));
	CHECK(p_cuDeviceGet(&device, 0));
	CHECK(p_cuCtxCreate_v2(&context, 0, device));
	CUVIDDECODECAPS caps = {.eCodecType = cudaVideoCodec_H264, .eChromaFormat = cudaVideoChromaFormat_420};
	CHECK(p_cuvidGetDecoderCaps(&caps));
	printf("h264 %d nvdecs %d max %u x %u\n", caps.bIsSupported, caps.nNumNVDECs, caps.nMaxWidth, caps.nMaxHeight);
	if (!caps.bIsSupported) return 4;
	report_memory();
	decode();
	if (argc > 2 && !strcmp(argv[1], "fill")) {
		static CUvideodecoder list[256];
		CUresult r = CUDA_SUCCESS;
		int n = 0, most = atoi(argv[2]) < 256 ? atoi(argv[2]) : 256;
		while (n < most && (r = create(&list[n], 4096, 4096, 16)) == CUDA_SUCCESS) n++;
		printf("decoders %d result %d refused %d\n", n, r, r != CUDA_SUCCESS);
		report_memory();
		if (n > 0) CHECK(p_cuvidDestroyDecoder(list[n - 1]));
		decode();
	}
	return 0;
}
