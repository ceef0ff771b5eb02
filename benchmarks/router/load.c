/*
 * Load for a router before the fake engine, and what a client sees of it, as one line of JSON.
 *
 *   load --port PORT (--connections N | --streams N) [--seconds S] [--warmup S] [--requests N] [--body BYTES] [--chunks N]
 *        [--even 0] [--usage 1] [--abort-every N] [--key TEXT] [--model NAME] [--path PATH] [--pids PID,PID,...]
 *        [--hash HEX] [--resend 0]
 *
 * --connections: a closed loop; each sends its next request when its answer is whole. --streams: so many answers are open all the
 * time; their starts are spread over a second, and the first ones are shorter by steps, so that later ones begin evenly (--even 0:
 * all are as long as --chunks says). Figures are those of the window of --seconds after --warmup; with --requests there is no
 * window and the run ends after so many.
 * --abort-every N: each Nth request asks for a stream and hangs up, in turn at once and after its first chunk. --pids: `cpu_s` is
 * the CPU time of these processes, ended threads included, in the window.
 * --hash: each whole answer must have this FNV-1a of 64 bits over its body without the digits of its stamps, and no stamp from before
 * its request: every byte is right, and of now. --resend 0: a connection that ends before any byte of an answer is an error even
 * where it was used before; otherwise such a request is sent again, because it may have crossed the end of an idle connection.
 *
 * An answer counts when its status is 200, its framing ended and its end is right: a plain one holds the engine's stamp and ends in
 * "}", a stream has as many chunks as were asked for and ends in [DONE]. All else is an error. A request without
 * a byte for 10 s at the end of the run is one as well. `cut` are those of the errors in which the connection broke, in place of saying
 * something wrong. `error` tells the first that says something wrong; where there is none, the first in which the connection broke.
 * The run ends early after 1,000 errors, and when nobody has had a byte for 30 s. Exit status: 0 unless the command line is wrong or the kernel refuses something.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 512, HEAD_MAX = 16384, TAIL = 16, READ_SIZE = 64 << 10, ERRORS_MAX = 1000, MESSAGE_SIZE = 1000, PIDS_MAX = 256 };
static const int64_t SECOND = 1000000000, STALLED = 10 * SECOND, SILENT = 30 * SECOND, AGAIN_AFTER = SECOND / 20;

enum state { WAITING, CONNECTING, SENDING, HEAD, BODY };
enum framing { LENGTH, CHUNKED, UNTIL_CLOSE };
enum chunk_state { SIZE, SIZE_REST, DATA, DATA_CR, DATA_LF, TRAILER };
enum kind { PLAIN, STREAM, ABORT_AT_ONCE, ABORT_AT_CHUNK };

struct connection {
    int descriptor; /* -1: none */
    enum state state;
    enum kind kind;
    int64_t start_ns; /* WAITING: when it begins */
    int64_t sent_ns, heard_ns;
    size_t sent;
    int waits_out; /* it is watched for room to send */
    long asked, chunks; /* chunks asked for, chunks seen */
    long answers;       /* whole answers on this descriptor */
    char head[HEAD_MAX];
    size_t head_size;
    enum framing framing;
    int closes;
    size_t left; /* of the body or of the chunk */
    enum chunk_state chunk;
    int line_size; /* digits of a chunk's size, or bytes of a trailer's line */
    size_t body_size;
    int digits; /* of a stamp that is being read: -1 when none is */
    int64_t stamp;
    char tail[TAIL];
    size_t tail_size;
    uint64_t hash;
    int in_stamp; /* what is hashed next comes after "@" and digits only */
    int stale;    /* a stamp was from before the request */
};

struct samples {
    int64_t *values;
    size_t count, room;
};

static struct sockaddr_in address = {.sin_family = AF_INET};
static int epoll_descriptor;
static struct connection *connections;
static long connection_count, streams, chunks_per_stream = 250, abort_every, requests_wanted;
static double window_s = 5, warmup_s = 1;
static size_t body_bytes = 500;
static const char *key = "bench-key", *model = "m", *path = "/v1/chat/completions";
static int ask_usage, even = 1, resend = 1;
static uint64_t hash_wanted; /* 0: bodies are not hashed */
static const uint64_t HASH_START = 0xcbf29ce484222325, HASH_PRIME = 0x100000001b3;
static int64_t heard_ns; /* when anybody had a byte */
static struct samples latency, delay, ttft;
static long waiting; /* connections in that state */
static long requests, begun, errors, cut, aborted, connects, chunk_count;
static int64_t bytes;
static char first_error[512];
static int64_t window_begin_ns, window_end_ns;
static int counting;
static long pids[PIDS_MAX];
static int pid_count;

/* A request as text; the number of chunks is written over the spaces at `number` before each is sent. It stands before the
   messages, so what is left after a short write never holds it. */
struct request {
    char *text;
    size_t size;
    char *number;
};
static struct request plain, stream;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * SECOND + now.tv_nsec;
}

static void fail(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* CPU seconds of the watched processes; one that has ended counts with nothing, and the difference then shows it. */
static double cpu_s(void) {
    double total = 0;
    for (int at = 0; at < pid_count; at++) {
        clockid_t clock;
        struct timespec used;
        if (clock_getcpuclockid((pid_t)pids[at], &clock) == 0 && clock_gettime(clock, &used) == 0)
            total += (double)used.tv_sec + (double)used.tv_nsec / 1e9;
    }
    return total;
}

static void take(struct samples *of, int64_t value) {
    if (of->count == of->room) {
        of->room = of->room ? of->room * 2 : 65536;
        if (!(of->values = realloc(of->values, of->room * sizeof *of->values)))
            fail("memory");
    }
    of->values[of->count++] = value;
}

static struct request make_request(int streamed, size_t size) {
    char *body = malloc(size + 4096), *text = malloc(size + 8192);
    if (!body || !text)
        fail("memory");
    size_t at = (size_t)sprintf(body, "{\"model\":\"%s\",\"max_tokens\":          ,%s\"messages\":[", model,
                                !streamed ? "" : ask_usage ? "\"stream\":true,\"stream_options\":{\"include_usage\":true}," : "\"stream\":true,");
    const char *open = "{\"role\":\"user\",\"content\":\"", *close = "\"}";
    for (int first = 1; first || at + strlen(open) + 4 < size; first = 0) { /* messages of 1 KB, as a long chat has them */
        at += (size_t)sprintf(body + at, "%s%s", first ? "" : ",", open);
        size_t end = at + MESSAGE_SIZE + 4 < size ? at + MESSAGE_SIZE : size > at + 4 ? size - 4 : at + 1;
        for (size_t word = 0; at < end; word++)
            body[at++] = word % 6 == 5 ? ' ' : (char)('a' + word % 23);
        at += (size_t)sprintf(body + at, "%s", close);
    }
    at += (size_t)sprintf(body + at, "]}");
    size_t head = (size_t)sprintf(text,
                                  "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"
                                  "User-Agent: load/1\r\nAccept: */*\r\nContent-Length: %zu\r\n\r\n",
                                  path, ntohs(address.sin_port), key, at);
    memcpy(text + head, body, at);
    free(body);
    return (struct request){text, head + at, strstr(text + head, "max_tokens\":") + 12};
}

static void watch(struct connection *one, int operation, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = one};
    if (epoll_ctl(epoll_descriptor, operation, one->descriptor, &event) < 0)
        fail("epoll_ctl");
}

static void watch_out(struct connection *one, int wanted) {
    if (one->waits_out != wanted)
        watch(one, EPOLL_CTL_MOD, wanted ? EPOLLIN | EPOLLOUT : EPOLLIN);
    one->waits_out = wanted;
}

static void hang_up(struct connection *one) {
    if (one->descriptor >= 0)
        close(one->descriptor);
    one->descriptor = -1;
    one->waits_out = 0;
    one->answers = 0;
}

static void wait_until(struct connection *one, int64_t start_ns) {
    waiting += one->state != WAITING;
    one->state = WAITING;
    one->start_ns = start_ns;
}

/* The first that says something wrong; until there is one, the first that broke. */
static void tell(int broke, const char *format, va_list values) {
    static int told_broke;
    if (first_error[0] && (broke || !told_broke))
        return;
    told_broke = broke;
    vsnprintf(first_error, sizeof first_error, format, values);
    for (char *at = first_error; *at; at++) /* it is printed inside JSON */
        if (*at == '"' || *at == '\\' || *at < 32 || *at > 126)
            *at = ' ';
}

static void failed(struct connection *one, int broke, const char *format, ...) {
    errors++;
    cut += broke;
    va_list values;
    va_start(values, format);
    tell(broke, format, values);
    va_end(values);
    hang_up(one);
    wait_until(one, now_ns() + AGAIN_AFTER);
}

#define wrong(one, ...) failed(one, 0, __VA_ARGS__)
#define broken_off(one, when, how) failed(one, 1, "the connection ended %s: %s", when, how)

static void send_more(struct connection *one);

static void begin(struct connection *one, int64_t now) {
    if (requests_wanted && begun >= requests_wanted) {
        hang_up(one);
        wait_until(one, INT64_MAX);
        return;
    }
    begun++;
    waiting -= one->state == WAITING;
    one->state = SENDING;
    one->kind = streams ? STREAM : PLAIN;
    if (abort_every && begun % abort_every == 0)
        one->kind = begun / abort_every % 2 ? ABORT_AT_ONCE : ABORT_AT_CHUNK;
    one->sent = one->head_size = one->body_size = one->tail_size = 0;
    one->chunks = 0;
    one->digits = -1;
    one->hash = HASH_START;
    one->in_stamp = one->stale = 0;
    one->sent_ns = one->heard_ns = now;
    if (one->descriptor >= 0) {
        send_more(one);
        return;
    }
    one->descriptor = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (one->descriptor < 0)
        fail("socket");
    int on = 1;
    setsockopt(one->descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    connects++;
    if (connect(one->descriptor, (struct sockaddr *)&address, sizeof address) == 0) {
        watch(one, EPOLL_CTL_ADD, EPOLLIN);
        send_more(one);
    } else if (errno == EINPROGRESS) {
        watch(one, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT);
        one->waits_out = 1;
        one->state = CONNECTING;
    } else {
        wrong(one, "connect: %s", strerror(errno));
    }
}

static const struct request *request_of(const struct connection *one) { return one->kind == PLAIN ? &plain : &stream; }

static void send_more(struct connection *one) {
    const struct request *of = request_of(one);
    if (one->sent == 0) {
        char number[16];
        snprintf(number, sizeof number, "%-10ld", one->kind == STREAM ? one->asked : one->kind == PLAIN ? 180 : 50);
        memcpy(of->number, number, 10);
    }
    ssize_t sent = send(one->descriptor, of->text + one->sent, of->size - one->sent, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) {
        broken_off(one, "in a request", strerror(errno));
        return;
    }
    one->sent += sent > 0 ? (size_t)sent : 0;
    int all = one->sent == of->size;
    watch_out(one, !all);
    one->state = all ? HEAD : SENDING;
    if (!all)
        return;
    if (one->kind == ABORT_AT_ONCE) {
        aborted++;
        hang_up(one);
        wait_until(one, 0);
    }
}

static void finished(struct connection *one) {
    int64_t now = now_ns();
    if (hash_wanted && (one->hash != hash_wanted || one->stale)) {
        wrong(one, one->stale ? "an answer from before its request" : "an answer of %zu bytes whose hash is %016llx", one->body_size,
              (unsigned long long)one->hash);
        return;
    }
    if (one->kind == PLAIN) {
        if (one->chunks != 1 || one->tail_size == 0 || one->tail[one->tail_size - 1] != '}') {
            wrong(one, "a plain answer of %zu bytes without its end", one->body_size);
            return;
        }
        if (counting)
            take(&latency, now - one->sent_ns);
    } else if (one->chunks != one->asked || one->tail_size < 6 || memcmp(one->tail + one->tail_size - 6, "[DONE]", 6) != 0) {
        wrong(one, "a stream of %ld chunks in place of %ld, which ends in %.*s", one->chunks, one->asked, (int)one->tail_size, one->tail);
        return;
    }
    if (counting)
        requests++;
    one->answers++;
    one->asked = chunks_per_stream;
    if (one->closes || one->sent < request_of(one)->size) /* an early answer: the rest of the request can no longer be sent */
        hang_up(one);
    begin(one, now);
}

static void stamped(struct connection *one, int64_t now) {
    one->chunks++;
    one->stale |= one->stamp < one->sent_ns;
    if (one->kind == ABORT_AT_CHUNK || one->kind == PLAIN || !counting)
        return;
    chunk_count++;
    take(&delay, now - one->stamp);
    if (one->chunks == 1)
        take(&ttft, now - one->sent_ns);
}

static void body(struct connection *one, const char *data, size_t size, int64_t now) {
    one->body_size += size;
    for (const char *at = data; hash_wanted && at < data + size; at++) {
        if (one->in_stamp && *at >= '0' && *at <= '9')
            continue;
        one->in_stamp = *at == '@';
        one->hash = (one->hash ^ (unsigned char)*at) * HASH_PRIME;
    }
    for (const char *at = data, *end = data + size; at < end;) {
        if (one->digits < 0) {
            const char *found = memchr(at, '@', (size_t)(end - at));
            if (!found)
                break;
            one->digits = 0;
            one->stamp = 0;
            at = found + 1;
        } else if (*at >= '0' && *at <= '9' && one->digits < 19) {
            one->stamp = one->stamp * 10 + (*at++ - '0');
            one->digits++;
        } else {
            if (*at == '@' && one->digits == 19) {
                stamped(one, now);
                at++;
            }
            one->digits = -1;
        }
    }
    while (size && (data[size - 1] == '\n' || data[size - 1] == '\r' || data[size - 1] == ' '))
        size--; /* line ends after the last word are the framing of events */
    size_t keep = size < TAIL ? size : TAIL, old = one->tail_size < TAIL - keep ? one->tail_size : TAIL - keep;
    memmove(one->tail, one->tail + one->tail_size - old, old);
    memcpy(one->tail + old, data + size - keep, keep);
    one->tail_size = old + keep;
}

/* Reads the body's framing: 1 when the answer is whole, -1 when it is broken. */
static int unframe(struct connection *one, const char *data, size_t size, int64_t now) {
    while (size) {
        if (one->framing == UNTIL_CLOSE || (one->framing == CHUNKED && one->chunk == DATA) || one->framing == LENGTH) {
            size_t now_size = one->framing != UNTIL_CLOSE && one->left < size ? one->left : size;
            body(one, data, now_size, now);
            data += now_size;
            size -= now_size;
            if (one->framing == UNTIL_CLOSE)
                continue;
            one->left -= now_size;
            if (one->left)
                continue;
            if (one->framing == LENGTH)
                return size ? -1 : 1;
            one->chunk = DATA_CR;
            continue;
        }
        char c = *data++;
        size--;
        switch (one->chunk) {
        case SIZE:
        case SIZE_REST:
            if (c == '\n') {
                if (one->line_size == 0)
                    return -1;
                one->chunk = one->left ? DATA : TRAILER;
                one->line_size = 0;
            } else if (one->chunk == SIZE && ((c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'f'))) {
                one->left = one->left * 16 + (size_t)(c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
                one->line_size++;
            } else {
                one->chunk = SIZE_REST;
            }
            break;
        case DATA_CR:
        case DATA_LF:
            if (c != (one->chunk == DATA_CR ? '\r' : '\n'))
                return -1;
            one->chunk = one->chunk == DATA_CR ? DATA_LF : SIZE;
            break;
        default: /* TRAILER: an empty line ends it */
            if (c == '\n') {
                if (one->line_size == 0)
                    return size ? -1 : 1;
                one->line_size = 0;
            } else if (c != '\r') {
                one->line_size++;
            }
        }
    }
    return 0;
}

/* Reads the head in `one->head`: the size of it, 0 when it is not whole yet. */
static size_t read_head(struct connection *one, int *status) {
    char *end = memmem(one->head, one->head_size, "\r\n\r\n", 4);
    if (!end)
        return 0;
    end[3] = 0;
    size_t size = (size_t)(end + 4 - one->head);
    *status = one->head_size > 12 ? atoi(one->head + 9) : 0;
    const char *length = strcasestr(one->head, "\r\ncontent-length:");
    int chunked = strcasestr(one->head, "\r\ntransfer-encoding: chunked") != NULL;
    one->framing = chunked ? CHUNKED : length ? LENGTH : UNTIL_CLOSE;
    one->left = length && !chunked ? strtoul(length + 17, NULL, 10) : 0;
    one->chunk = SIZE;
    one->line_size = 0;
    one->closes = strcasestr(one->head, "\r\nconnection: close") != NULL || one->framing == UNTIL_CLOSE;
    return size;
}

static void received(struct connection *one, char *data, size_t size, int64_t now) {
    one->heard_ns = heard_ns = now;
    if (counting)
        bytes += (int64_t)size;
    if (one->state == SENDING)
        one->state = HEAD; /* an early answer; what is left of the request stays unsent */
    if (one->state != HEAD && one->state != BODY) {
        wrong(one, "bytes that nobody asked for");
        return;
    }
    if (one->state == HEAD) {
        size_t had = one->head_size, room = HEAD_MAX - 1 - had, more = size < room ? size : room, head;
        int status = 0;
        memcpy(one->head + had, data, more);
        one->head_size = had + more;
        while ((head = read_head(one, &status)) && status >= 100 && status < 200) { /* an interim answer */
            memmove(one->head, one->head + head, one->head_size - head);
            one->head_size -= head;
            had = had > head ? had - head : 0;
            data += head < size ? head : size;
            size -= head < size ? head : size;
        }
        if (!head) {
            if (one->head_size >= HEAD_MAX - 1)
                wrong(one, "a head of more than %d bytes", HEAD_MAX);
            return;
        }
        if (status != 200) {
            wrong(one, "status %d: %.*s", status, (int)(one->head_size - head < 200 ? one->head_size - head : 200), one->head + head);
            return;
        }
        one->state = BODY;
        data += head - had;
        size -= head - had;
    }
    int whole = unframe(one, data, size, now);
    if (whole < 0)
        wrong(one, "bytes after the end of an answer, or broken framing");
    else if (one->kind == ABORT_AT_CHUNK && one->chunks) {
        aborted++;
        hang_up(one);
        begin(one, now);
    } else if (whole)
        finished(one);
}

static void readable(struct connection *one) {
    static char data[READ_SIZE];
    while (one->descriptor >= 0) {
        ssize_t got = recv(one->descriptor, data, sizeof data, 0);
        int64_t now = now_ns();
        if (got < 0 && errno == EAGAIN)
            return;
        if (got > 0) {
            int before = one->descriptor;
            long answers = one->answers;
            received(one, data, (size_t)got, now);
            if (one->descriptor != before || one->answers != answers || (size_t)got < sizeof data)
                return;
            continue;
        }
        if (got == 0 && one->state == BODY && one->framing == UNTIL_CLOSE)
            finished(one);
        else if (resend && one->answers && one->state == HEAD && one->head_size == 0 && one->kind == PLAIN) { /* an idle connection was closed as we wrote */
            begun--;
            hang_up(one);
            begin(one, now);
        } else
            broken_off(one, one->state == HEAD ? "before an answer" : "in an answer", got < 0 ? strerror(errno) : "closed");
        return;
    }
}

static void writable(struct connection *one) {
    if (one->state == CONNECTING) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(one->descriptor, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error) { /* one that was taken in and then reset, before we came to write, was no refusal */
            failed(one, error == ECONNRESET, "connect: %s", strerror(error));
            return;
        }
    }
    if (one->state == CONNECTING || one->state == SENDING)
        send_more(one);
    else
        watch_out(one, 0);
}

static int by_value(const void *left, const void *right) {
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

static void print_samples(const char *name, struct samples *of) {
    qsort(of->values, of->count, sizeof *of->values, by_value);
    printf(",\"%s\":{\"count\":%zu", name, of->count);
    static const struct {
        const char *name;
        double share;
    } shares[] = {{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"max", 1}};
    for (size_t at = 0; at < 4 && of->count; at++) {
        size_t index = (size_t)(shares[at].share * (double)of->count);
        printf(",\"%s\":%.1f", shares[at].name, (double)of->values[index < of->count ? index : of->count - 1] / 1000);
    }
    printf("}");
}

static void usage(void) {
    fprintf(stderr, "usage: load --port PORT (--connections N | --streams N) [--seconds S] [--warmup S] [--requests N] [--body BYTES] "
                    "[--chunks N] [--even 0] [--usage 1] [--abort-every N] [--key TEXT] [--model NAME] [--path PATH] [--pids PID,PID,...] "
                    "[--hash HEX] [--resend 0]\n");
    exit(2);
}

static void options(int count, char **arguments) {
    long port = 0, closed_loop = 0;
    for (int at = 1; at < count; at += 2) {
        const char *name = arguments[at], *value = at + 1 < count ? arguments[at + 1] : "";
        if (!strcmp(name, "--port"))
            port = atol(value);
        else if (!strcmp(name, "--connections"))
            closed_loop = atol(value);
        else if (!strcmp(name, "--streams"))
            streams = atol(value);
        else if (!strcmp(name, "--seconds"))
            window_s = atof(value);
        else if (!strcmp(name, "--warmup"))
            warmup_s = atof(value);
        else if (!strcmp(name, "--requests"))
            requests_wanted = atol(value);
        else if (!strcmp(name, "--body"))
            body_bytes = (size_t)atol(value);
        else if (!strcmp(name, "--chunks"))
            chunks_per_stream = atol(value);
        else if (!strcmp(name, "--even"))
            even = atoi(value);
        else if (!strcmp(name, "--usage"))
            ask_usage = atoi(value);
        else if (!strcmp(name, "--abort-every"))
            abort_every = atol(value);
        else if (!strcmp(name, "--key"))
            key = value;
        else if (!strcmp(name, "--model"))
            model = value;
        else if (!strcmp(name, "--path"))
            path = value;
        else if (!strcmp(name, "--hash"))
            hash_wanted = strtoull(value, NULL, 16);
        else if (!strcmp(name, "--resend"))
            resend = atoi(value);
        else if (!strcmp(name, "--pids")) {
            for (char *next = (char *)value; *next && pid_count < PIDS_MAX; next += *next == ',')
                pids[pid_count++] = strtol(next, &next, 10);
        } else
            usage();
    }
    connection_count = streams ? streams : closed_loop;
    if (port < 1 || port > 65535 || connection_count < 1 || (streams && closed_loop) || window_s <= 0 || warmup_s < 0 || chunks_per_stream < 1 ||
        strlen(model) + strlen(path) + strlen(key) > 2000)
        usage();
    address.sin_port = htons((uint16_t)port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
}

int main(int count, char **arguments) {
    options(count, arguments);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    signal(SIGPIPE, SIG_IGN);
    plain = make_request(0, body_bytes);
    stream = make_request(1, body_bytes);
    epoll_descriptor = epoll_create1(EPOLL_CLOEXEC);
    connections = calloc((size_t)connection_count, sizeof *connections);
    if (!connections)
        fail("memory");
    int64_t began_ns = now_ns(), now = began_ns;
    waiting = connection_count;
    heard_ns = began_ns;
    for (long at = 0; at < connection_count; at++) {
        connections[at].descriptor = -1;
        connections[at].asked = streams && even ? 1 + (chunks_per_stream - 1) * (at + 1) / connection_count : chunks_per_stream;
        wait_until(&connections[at], began_ns + (streams ? SECOND * at / connection_count : 0));
    }
    window_begin_ns = began_ns + (requests_wanted ? 0 : (int64_t)(warmup_s * 1e9));
    window_end_ns = requests_wanted ? INT64_MAX : window_begin_ns + (int64_t)(window_s * 1e9);
    double cpu_begin_s = 0;
    struct epoll_event events[EVENTS];
    while (now < window_end_ns && errors < ERRORS_MAX && now - heard_ns < SILENT) {
        if (!counting && now >= window_begin_ns) {
            counting = 1;
            window_begin_ns = now_ns();
            cpu_begin_s = cpu_s();
        }
        int64_t next = counting ? window_end_ns : window_begin_ns;
        long over = 0;
        for (long at = 0; at < connection_count && waiting; at++) {
            struct connection *one = &connections[at];
            if (one->state != WAITING)
                continue;
            over += one->start_ns == INT64_MAX;
            if (one->start_ns <= now)
                begin(one, now);
            else if (one->start_ns < next)
                next = one->start_ns;
        }
        if (over == connection_count)
            break;
        now = now_ns();
        int64_t left = next - now < SECOND / 10 ? next - now : SECOND / 10;
        struct timespec limit = {.tv_nsec = left > 0 ? left : 0};
        int found = epoll_pwait2(epoll_descriptor, events, EVENTS, &limit, NULL);
        if (found < 0 && errno != EINTR)
            fail("epoll_wait");
        for (int at = 0; at < found; at++) {
            struct connection *one = events[at].data.ptr;
            if (one->descriptor >= 0 && events[at].events & EPOLLOUT)
                writable(one);
            if (one->descriptor >= 0 && events[at].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                readable(one);
        }
        now = now_ns();
    }
    double used_s = cpu_s() - cpu_begin_s, seconds = (double)(now_ns() - window_begin_ns) / 1e9;
    if (!counting)
        used_s = seconds = 0;
    counting = 0;
    for (long at = 0; at < connection_count; at++)
        if (connections[at].state != WAITING && now - connections[at].heard_ns > STALLED)
            wrong(&connections[at], "no byte for 10 s");
    printf("{\"seconds\":%.6f,\"cpu_s\":%.6f,\"requests\":%ld,\"errors\":%ld,\"cut\":%ld,\"error\":\"%s\",\"aborted\":%ld,\"connects\":%ld,\"bytes\":%lld,"
           "\"chunks\":%ld",
           seconds, used_s, requests, errors, cut, first_error, aborted, connects, (long long)bytes, chunk_count);
    print_samples("latency_us", &latency);
    print_samples("delay_us", &delay);
    print_samples("ttft_us", &ttft);
    printf("}\n");
    return 0;
}
