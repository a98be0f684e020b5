// OpenGL ES without a window or a display: a device of EGL_EXT_device_enumeration, a buffer of 256 x 256, a triangle that is looked at.
//   egl                     the triangle alone
//   egl fill MIB MAX_MIB    and textures in pieces of MIB until one is refused, or it has MAX_MIB; the triangle is then drawn again. OpenGL
//                           may put textures into the host's memory instead of refusing one.
//   egl long MS SECONDS fragments|triangles
//                           and draws of so long for so many seconds: of fragments that each take all of it, or of many triangles, of
//                           which none takes long
// EGL_DEVICE=N takes the Nth device. Exit status 3: no device, 4: no display. Build: cc -o egl egl.c -lEGL -lGLESv2
#include <EGL/egl.h>
#include <EGL/eglext.h>
#include <GLES3/gl3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SIDE = 256 };

static void fail(const char *what, int status) {
	fprintf(stderr, "%s: EGL error %#x\n", what, eglGetError());
	exit(status);
}

static GLuint shader(GLenum kind, const char *text) {
	GLuint s = glCreateShader(kind);
	GLint ok;
	glShaderSource(s, 1, &text, NULL);
	glCompileShader(s);
	glGetShaderiv(s, GL_COMPILE_STATUS, &ok);
	if (!ok) {
		char why[512] = "";
		glGetShaderInfoLog(s, sizeof why, NULL, why);
		fprintf(stderr, "shader: %s\n", why);
		exit(1);
	}
	return s;
}

static GLuint program(const char *vertex, const char *fragment) {
	GLuint p = glCreateProgram();
	glAttachShader(p, shader(GL_VERTEX_SHADER, vertex));
	glAttachShader(p, shader(GL_FRAGMENT_SHADER, fragment));
	glBindAttribLocation(p, 0, "at");
	glLinkProgram(p);
	glUseProgram(p);
	return p;
}

static void open_context(void) {
	PFNEGLQUERYDEVICESEXTPROC query = (PFNEGLQUERYDEVICESEXTPROC)eglGetProcAddress("eglQueryDevicesEXT");
	PFNEGLGETPLATFORMDISPLAYEXTPROC display_of = (PFNEGLGETPLATFORMDISPLAYEXTPROC)eglGetProcAddress("eglGetPlatformDisplayEXT");
	EGLDeviceEXT devices[16];
	EGLint n = 0, major, minor;
	if (!query || !display_of || !query(16, devices, &n) || n == 0) fail("no EGL device", 3);
	const char *number = getenv("EGL_DEVICE");
	EGLDisplay display = display_of(EGL_PLATFORM_DEVICE_EXT, devices[number ? atoi(number) % n : 0], NULL);
	if (display == EGL_NO_DISPLAY || !eglInitialize(display, &major, &minor)) fail("eglInitialize", 4);
	printf("devices %d vendor %s version %d.%d\n", n, eglQueryString(display, EGL_VENDOR), major, minor);

	EGLint want[] = {EGL_SURFACE_TYPE, EGL_PBUFFER_BIT, EGL_RENDERABLE_TYPE, EGL_OPENGL_ES3_BIT, EGL_RED_SIZE, 8, EGL_GREEN_SIZE, 8, EGL_BLUE_SIZE, 8, EGL_NONE};
	EGLint side[] = {EGL_WIDTH, SIDE, EGL_HEIGHT, SIDE, EGL_NONE}, version[] = {EGL_CONTEXT_CLIENT_VERSION, 3, EGL_NONE};
	EGLConfig config;
	if (!eglChooseConfig(display, want, &config, 1, &n) || n == 0) fail("eglChooseConfig", 1);
	EGLSurface surface = eglCreatePbufferSurface(display, config, side);
	if (surface == EGL_NO_SURFACE) fail("eglCreatePbufferSurface", 1);
	EGLContext context = eglCreateContext(display, config, EGL_NO_CONTEXT, version);
	if (context == EGL_NO_CONTEXT) fail("eglCreateContext", 1);
	if (!eglMakeCurrent(display, surface, surface, context)) fail("eglMakeCurrent", 1);
	printf("renderer %s, %s\n", glGetString(GL_RENDERER), glGetString(GL_VERSION));
}

// triangle: the lower left half is green, the rest black.
static void triangle(void) {
	static const GLfloat corners[] = {-1, -1, 1, -1, -1, 1};
	GLubyte in[4], out[4];
	glViewport(0, 0, SIDE, SIDE);
	glClearColor(0, 0, 0, 1);
	glClear(GL_COLOR_BUFFER_BIT);
	glVertexAttribPointer(0, 2, GL_FLOAT, GL_FALSE, 0, corners);
	glEnableVertexAttribArray(0);
	glDrawArrays(GL_TRIANGLES, 0, 3);
	glReadPixels(SIDE / 4, SIDE / 4, 1, 1, GL_RGBA, GL_UNSIGNED_BYTE, in);
	glReadPixels(SIDE * 3 / 4, SIDE * 3 / 4, 1, 1, GL_RGBA, GL_UNSIGNED_BYTE, out);
	GLenum error = glGetError();
	int right = error == 0 && in[0] == 0 && in[1] == 255 && in[2] == 0 && out[0] == 0 && out[1] == 0 && out[2] == 0;
	printf("triangle right %d error %#x\n", right, error);
	fflush(stdout);
	if (!right) exit(1);
}

static void fill(int piece, int max) {
	GLenum error = 0;
	int sum = 0;
	while (error == 0 && sum < max) {
		GLuint texture;
		glGenTextures(1, &texture);
		glBindTexture(GL_TEXTURE_2D, texture);
		glTexStorage2D(GL_TEXTURE_2D, 1, GL_RGBA8, 4096, piece * 64); // 4096 x 64 of 4 bytes are 1 MiB
		GLuint frame; // cleared, so that there is memory behind it
		glGenFramebuffers(1, &frame);
		glBindFramebuffer(GL_FRAMEBUFFER, frame);
		glFramebufferTexture2D(GL_FRAMEBUFFER, GL_COLOR_ATTACHMENT0, GL_TEXTURE_2D, texture, 0);
		glClear(GL_COLOR_BUFFER_BIT);
		glFinish();
		error = glGetError();
		if (error == 0) sum += piece;
	}
	glBindFramebuffer(GL_FRAMEBUFFER, 0);
	printf("allocated_MiB %d error %#x refused %d\n", sum, error, error == GL_OUT_OF_MEMORY);
	fflush(stdout);
}

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

// timed draws so much, fragments' rounds or triangles, and says how long that took.
static double timed(GLint rounds_at, long amount, int fragments) {
	double begin = now();
	glUniform1i(rounds_at, fragments ? (GLint)amount : 100);
	glDrawArraysInstanced(GL_TRIANGLES, 0, 3, fragments ? 1 : (GLsizei)amount);
	glFinish();
	return now() - begin;
}

static void draw_long(double each, double seconds, int fragments) {
	GLuint p = program("#version 300 es\nin vec2 at; void main() { gl_Position = vec4(at, 0.0, 1.0); }",
		"#version 300 es\nprecision highp float; uniform int rounds; out vec4 color;"
		"void main() { float x = gl_FragCoord.x; for (int i = 0; i < rounds; i++) x = x * 1.0001 + 0.5; color = vec4(x, 1.0, 0.0, 1.0); }");
	GLint rounds_at = glGetUniformLocation(p, "rounds");
	long amount = 100, draws = 0;
	timed(rounds_at, 1, fragments); // it is compiled then
	double took = timed(rounds_at, amount, fragments);
	for (int i = 0; i < 30 && took < each * 0.9; i++) { // by steps, so that none is much too long
		double more = each / took;
		amount = (long)((double)amount * (more > 8 ? 8 : more)) + 1;
		if (amount > 2000000000) amount = 2000000000;
		took = timed(rounds_at, amount, fragments);
	}
	printf("long amount %ld took_ms %.1f\n", amount, took * 1e3);
	fflush(stdout);
	double begin = now(), worst = 0;
	for (; now() - begin < seconds; draws++) {
		took = timed(rounds_at, amount, fragments);
		if (took > worst) worst = took;
	}
	GLenum error = glGetError();
	printf("draws %ld worst_ms %.1f error %#x\n", draws, worst * 1e3, error);
	fflush(stdout);
	if (error) exit(1);
}

int main(int argc, char **argv) {
	open_context();
	program("attribute vec2 at; void main() { gl_Position = vec4(at, 0.0, 1.0); }",
		"precision mediump float; void main() { gl_FragColor = vec4(0.0, 1.0, 0.0, 1.0); }");
	triangle();
	if (argc > 3 && !strcmp(argv[1], "fill")) {
		fill(atoi(argv[2]), atoi(argv[3]));
		triangle();
	} else if (argc > 4 && !strcmp(argv[1], "long")) {
		draw_long(atof(argv[2]) * 1e-3, atof(argv[3]), !strcmp(argv[4], "fragments"));
	}
	return 0;
}
