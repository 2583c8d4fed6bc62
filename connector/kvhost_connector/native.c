/* Copies blocks between their pages and their images at the speed of memory, for native.py.
 *
 * A page copied by itself waits for memory most of its time: one stream of reads keeps few lines in flight,
 * and ordinary stores read every line before they overwrite it. Here four ranges are copied side by side, a
 * line of each in turn, with stores that go past the caches. What is stored is not read again soon by this
 * core, and four streams keep the memory busy. Each is asked for some lines ahead: the processor looks ahead by
 * itself, but starts anew with every page of 4 KiB.
 *
 * A plain shared library without Python in it. Nothing here checks an address: native.py does.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define X86 1
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))

enum { LINE = 64, LANES = 4 };

/* So far ahead a lane is asked for. Measured: from three to seven lines a load is 2 to 7 % faster than without,
 * and a store no slower. Behind the end of a range this touches nothing. */
#define AHEAD (5 * LINE)
#define ASK(from) _mm_prefetch((from) + AHEAD, _MM_HINT_T0)

/* Below this a range is not worth the lanes. */
#define SMALL 512

/* Numbers that native.py knows by name. */
enum kernel { PLAIN = 0, AVX2 = 1, AVX512 = 2 };

/* Where one of the ranges that are copied side by side has got to. `to` is at the start of a line, `left` is
 * a number of whole lines. */
struct lane {
    char *to;
    const char *from;
    size_t left;
};

typedef void move(struct lane *lanes, size_t bytes);

/* What is copied: of each block, some spans. For block number `block[b]` span s is `bytes[s]` bytes at
 * `address[s] + block[b] * stride[s]`, and in the block's image at `image[b] + offset[s]`. */
struct list {
    int store; /* from the pages to the images; else the other way round */
    size_t blocks, spans;
    const int64_t *block, *image;
    const int64_t *address, *stride, *offset, *bytes;
};

/* The n-th range: all of a block before the next one. Returns its bytes. */
static size_t range(const struct list *list, size_t n, char **to, const char **from)
{
    size_t b = n / list->spans, s = n % list->spans;
    char *page = (char *)(list->address[s] + list->block[b] * list->stride[s]);
    char *image = (char *)(list->image[b] + list->offset[s]);
    *to = list->store ? image : page;
    *from = list->store ? page : image;
    return (size_t)list->bytes[s];
}

#ifdef X86

__attribute__((target("avx2"))) static void move_avx2(struct lane *lanes, size_t bytes)
{
    char *a = lanes[0].to, *b = lanes[1].to, *c = lanes[2].to, *d = lanes[3].to;
    const char *p = lanes[0].from, *q = lanes[1].from, *r = lanes[2].from, *s = lanes[3].from;
#define HALF(to, from) _mm256_stream_si256((__m256i *)(to), _mm256_loadu_si256((const __m256i *)(from)))
    for (size_t i = 0; i < bytes; i += LINE) {
        ASK(p + i);
        ASK(q + i);
        ASK(r + i);
        ASK(s + i);
        HALF(a + i, p + i);
        HALF(a + i + 32, p + i + 32);
        HALF(b + i, q + i);
        HALF(b + i + 32, q + i + 32);
        HALF(c + i, r + i);
        HALF(c + i + 32, r + i + 32);
        HALF(d + i, s + i);
        HALF(d + i + 32, s + i + 32);
    }
#undef HALF
}

__attribute__((target("avx512f"))) static void move_avx512(struct lane *lanes, size_t bytes)
{
    char *a = lanes[0].to, *b = lanes[1].to, *c = lanes[2].to, *d = lanes[3].to;
    const char *p = lanes[0].from, *q = lanes[1].from, *r = lanes[2].from, *s = lanes[3].from;
#define WHOLE(to, from) _mm512_stream_si512((__m512i *)(to), _mm512_loadu_si512((const void *)(from)))
    for (size_t i = 0; i < bytes; i += LINE) {
        ASK(p + i);
        ASK(q + i);
        ASK(r + i);
        ASK(s + i);
        WHOLE(a + i, p + i);
        WHOLE(b + i, q + i);
        WHOLE(c + i, r + i);
        WHOLE(d + i, s + i);
    }
#undef WHOLE
}

static size_t least(const struct lane *lanes)
{
    size_t bytes = lanes[0].left;
    for (int k = 1; k < LANES; k++)
        if (lanes[k].left < bytes)
            bytes = lanes[k].left;
    return bytes;
}

/* Copies what does not make whole lines of the destination; the rest is left to the lane. */
static void begin(struct lane *lane, char *to, const char *from, size_t bytes)
{
    lane->left = 0;
    if (bytes < SMALL) {
        memcpy(to, from, bytes);
        return;
    }
    size_t head = -(uintptr_t)to % LINE;
    size_t tail = (bytes - head) % LINE;
    memcpy(to, from, head);
    memcpy(to + bytes - tail, from + bytes - tail, tail);
    lane->to = to + head;
    lane->from = from + head;
    lane->left = bytes - head - tail;
}

/* What is left of a range when no others are left to go beside it: four parts of itself do. */
static void finish(struct lane *lane, move *move_lines)
{
    struct lane parts[LANES];
    size_t part = lane->left / LANES / LINE * LINE;
    for (int k = 0; k < LANES; k++) {
        parts[k].to = lane->to + k * part;
        parts[k].from = lane->from + k * part;
    }
    move_lines(parts, part);
    memcpy(lane->to + LANES * part, lane->from + LANES * part, lane->left - LANES * part);
}

static void copy_in_lanes(const struct list *list, move *move_lines)
{
    struct lane lanes[LANES] = {{0}};
    size_t next = 0, count = list->blocks * list->spans;
    for (;;) {
        for (int k = 0; k < LANES; k++)
            while (lanes[k].left == 0 && next < count) {
                char *to;
                const char *from;
                size_t bytes = range(list, next++, &to, &from);
                begin(&lanes[k], to, from, bytes);
            }
        size_t step = least(lanes);
        if (step == 0)
            break;
        move_lines(lanes, step);
        for (int k = 0; k < LANES; k++) {
            lanes[k].to += step;
            lanes[k].from += step;
            lanes[k].left -= step;
        }
    }
    for (int k = 0; k < LANES; k++)
        if (lanes[k].left)
            finish(&lanes[k], move_lines);
    /* Stores past the caches are seen by nobody in order before this. */
    _mm_sfence();
}

#endif

/* The best kernel of this processor. */
EXPORT int kvhost_best_kernel(void)
{
#ifdef X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        return AVX512;
    if (__builtin_cpu_supports("avx2"))
        return AVX2;
#endif
    return PLAIN;
}

/* Copies a `struct list`, whose members these are. No destination overlaps a source or another destination.
 * The kernel is PLAIN or one that `kvhost_best_kernel` has or surpasses. */
EXPORT void kvhost_copy(int kernel, int store, size_t blocks, size_t spans, const int64_t *block,
                        const int64_t *image, const int64_t *address, const int64_t *stride,
                        const int64_t *offset, const int64_t *bytes)
{
    struct list list = {store, blocks, spans, block, image, address, stride, offset, bytes};
#ifdef X86
    if (kernel == AVX512) {
        copy_in_lanes(&list, move_avx512);
        return;
    }
    if (kernel == AVX2) {
        copy_in_lanes(&list, move_avx2);
        return;
    }
#endif
    (void)kernel;
    for (size_t n = 0; n < blocks * spans; n++) {
        char *to;
        const char *from;
        size_t size = range(&list, n, &to, &from);
        memcpy(to, from, size);
    }
}
