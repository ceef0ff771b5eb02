/*
 * A fast fake engine: OpenAI chat answers without a model, so that what is measured is the router before it.
 *
 *   engine --port PORT [--addresses N] [--rate CHUNKS_PER_S] [--chunks N] [--content-type TYPE]
 *
 * One thread on epoll. It listens on PORT of N loopback addresses: 127.0.0.1 to .250, then 127.0.1.1 and so on. A request without
 * "stream":true gets one JSON answer of 1.1 KB with `usage`; one with it gets "max_tokens" (else --chunks) events of about 200
 * bytes, the first at once and the others at --rate, a usage event when "include_usage":true stands in the body, and [DONE].
 * Every answer holds "@", its send time (CLOCK_MONOTONIC in ns, 19 digits) and "@"; the load generator on the same machine reads
 * it. --content-type is that of streams: a router relays what is no text/event-stream as bytes. It ends on SIGTERM or SIGINT.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BODY_MAX = 64 << 20, READ_SIZE = 256 << 10, EVENTS = 512, OUT_SIZE = 2048 };

/* `next_ns` orders the streams that wait for their next chunk. All have one period, so a queue is in order and needs no heap. */
struct connection {
    int descriptor;
    char *in;
    size_t in_size, in_room;
    char out[OUT_SIZE]; /* what the socket would not take yet */
    size_t out_size;
    long chunks_left; /* of the stream that runs; 0: none runs */
    int with_usage;
    int queued;
    int64_t next_ns;
    struct connection *next, *previous;
};

static int epoll_descriptor;
static struct connection *queue_first, *queue_last;
static struct connection *closed; /* freed after the batch of events that may still name them */
static int64_t period_ns;
static long chunks_default = 100;
static const char *content_type = "text/event-stream";
static long running;
static char filler[1024];
static volatile sig_atomic_t ended;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void fail(const char *what) {
    fprintf(stderr, "engine: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void queue_leave(struct connection *one) {
    if (!one->queued)
        return;
    *(one->previous ? &one->previous->next : &queue_first) = one->next;
    *(one->next ? &one->next->previous : &queue_last) = one->previous;
    one->next = one->previous = NULL;
    one->queued = 0;
}

static void queue_join(struct connection *one, int64_t next_ns) {
    one->next_ns = next_ns;
    one->previous = queue_last;
    one->next = NULL;
    *(queue_last ? &queue_last->next : &queue_first) = one;
    queue_last = one;
    one->queued = 1;
}

static void drop(struct connection *one) {
    if (one->descriptor < 0)
        return;
    queue_leave(one);
    if (one->chunks_left)
        running--;
    one->chunks_left = 0;
    close(one->descriptor);
    one->descriptor = -1;
    one->next = closed;
    closed = one;
}

static void watch(struct connection *one, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = one};
    if (epoll_ctl(epoll_descriptor, EPOLL_CTL_MOD, one->descriptor, &event) < 0)
        fail("epoll_ctl");
}

/* Sends all of it, or keeps the rest and waits until the socket takes it: 0 while a rest waits, -1 when the peer is gone. */
static int send_out(struct connection *one, const char *data, size_t size) {
    ssize_t sent = send(one->descriptor, data, size, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) {
        drop(one);
        return -1;
    }
    if (sent < 0)
        sent = 0;
    if ((size_t)sent == size)
        return 1;
    one->out_size = size - sent;
    memmove(one->out, data + sent, one->out_size);
    watch(one, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
    return 0;
}

static int send_answer(struct connection *one, const char *status, const char *type, const char *body, size_t size) {
    char answer[OUT_SIZE];
    int head = snprintf(answer, sizeof answer, "HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n", status, type, size);
    memcpy(answer + head, body, size);
    return send_out(one, answer, head + size);
}

static int send_chat(struct connection *one) {
    char body[OUT_SIZE - 256];
    int size = snprintf(body, sizeof body,
                        "{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"m\",\"choices\":"
                        "[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"%.800s @%019lld@\"},\"logprobs\":null,"
                        "\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":110,\"completion_tokens\":180,\"total_tokens\":290}}",
                        filler, (long long)now_ns());
    return send_answer(one, "200 OK", "application/json", body, size);
}

/* One event of the running stream; after the last one what follows it. Each is an HTTP chunk of its own, as engines send them. */
static int send_chunk(struct connection *one, int first) {
    char out[OUT_SIZE], event[512];
    int size = 0;
    if (first)
        size = snprintf(out, sizeof out, "HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n",
                        content_type);
    int last = --one->chunks_left == 0;
    int length = snprintf(event, sizeof event,
                          "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"m\","
                          "\"choices\":[{\"index\":0,\"delta\":{%s\"content\":\"@%019lld@ \"},\"finish_reason\":%s}]}\n\n",
                          first ? "\"role\":\"assistant\"," : "", (long long)now_ns(), last ? "\"stop\"" : "null");
    size += snprintf(out + size, sizeof out - size, "%x\r\n%s\r\n", length, event);
    if (last) {
        running--;
        if (one->with_usage) {
            length = snprintf(event, sizeof event,
                              "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"m\","
                              "\"choices\":[],\"usage\":{\"prompt_tokens\":110,\"completion_tokens\":180,\"total_tokens\":290}}\n\n");
            size += snprintf(out + size, sizeof out - size, "%x\r\n%s\r\n", length, event);
        }
        size += snprintf(out + size, sizeof out - size, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    }
    return send_out(one, out, size);
}

static int holds(const char *text, size_t size, const char *wanted) { return memmem(text, size, wanted, strlen(wanted)) != NULL; }

/* The value of a JSON key in `text`, or NULL. Inside a string the quotes would be escaped, so a prompt cannot look like a key. */
static const char *value_of(const char *text, size_t size, const char *key) {
    const char *at = memmem(text, size, key, strlen(key));
    if (!at)
        return NULL;
    at += strlen(key);
    while (at < text + size && (*at == ' ' || *at == ':'))
        at++;
    return at < text + size ? at : NULL;
}

static int is_true(const char *text, size_t size, const char *key) {
    const char *value = value_of(text, size, key);
    return value && value + 4 <= text + size && memcmp(value, "true", 4) == 0;
}

static int answer(struct connection *one, const char *head, size_t head_size, const char *body, size_t body_size) {
    if (memcmp(head, "POST ", 5) == 0) {
        if (!is_true(body, body_size, "\"stream\""))
            return send_chat(one);
        const char *number = value_of(body, body_size, "\"max_tokens\"");
        long chunks = number ? strtol(number, NULL, 10) : 0;
        one->chunks_left = chunks > 0 ? chunks : chunks_default;
        one->with_usage = is_true(body, body_size, "\"include_usage\"");
        running++;
        int64_t began_ns = now_ns();
        int sent = send_chunk(one, 1);
        if (sent > 0 && one->chunks_left)
            queue_join(one, began_ns + period_ns);
        return sent;
    }
    char text[512];
    if (holds(head, head_size < 64 ? head_size : 64, " /health"))
        return send_answer(one, "200 OK", "text/plain", "ok\n", 3);
    if (holds(head, head_size < 64 ? head_size : 64, " /v1/models")) {
        int size = snprintf(text, sizeof text, "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1700000000,"
                                               "\"owned_by\":\"bench\"}]}");
        return send_answer(one, "200 OK", "application/json", text, size);
    }
    if (holds(head, head_size < 64 ? head_size : 64, " /metrics")) {
        int size = snprintf(text, sizeof text, "vllm:num_requests_running{model_name=\"m\"} %ld\nvllm:num_requests_waiting{model_name=\"m\"} 0\n",
                            running);
        return send_answer(one, "200 OK", "text/plain; version=0.0.4", text, size);
    }
    static const char missing[] = "{\"error\":{\"message\":\"no such path\"}}";
    return send_answer(one, "404 Not Found", "application/json", missing, sizeof missing - 1);
}

/* Answers what has come whole. A next request waits in the buffer while a stream runs or the socket is full. */
static void requests(struct connection *one) {
    while (one->descriptor >= 0 && !one->chunks_left && !one->out_size) {
        char *end = memmem(one->in, one->in_size, "\r\n\r\n", 4);
        if (!end)
            return;
        size_t head = end + 4 - one->in, body = 0, whole;
        char last = one->in[head - 1];
        one->in[head - 1] = 0; /* a text for strcasestr */
        const char *length = strcasestr(one->in, "\r\ncontent-length:");
        int chunked = strcasestr(one->in, "\r\ntransfer-encoding:") != NULL;
        if (length)
            body = strtoul(length + 17, NULL, 10);
        int expects = strcasestr(one->in, "\r\nexpect:") != NULL;
        one->in[head - 1] = last;
        if (chunked) { /* enough for peers that send one request at a time: it ends where the bytes end as a last chunk does */
            if (one->in_size - head < 5 || memcmp(one->in + one->in_size - 5, "0\r\n\r\n", 5) != 0)
                return;
            body = one->in_size - head;
        }
        whole = head + body;
        if (one->in_size < whole) {
            if (expects && one->in_size == head)
                send_out(one, "HTTP/1.1 100 Continue\r\n\r\n", 25);
            return;
        }
        if (answer(one, one->in, head, one->in + head, body) < 0)
            return;
        one->in_size -= whole;
        memmove(one->in, one->in + whole, one->in_size);
    }
}

static void readable(struct connection *one) {
    for (;;) {
        if (one->in_room - one->in_size < 4096) {
            one->in_room = one->in_room ? one->in_room * 2 : 8192;
            if (one->in_room > BODY_MAX || !(one->in = realloc(one->in, one->in_room))) {
                fprintf(stderr, "engine: a request of more than %d bytes\n", BODY_MAX);
                exit(1);
            }
        }
        size_t room = one->in_room - one->in_size;
        ssize_t got = recv(one->descriptor, one->in + one->in_size, room < READ_SIZE ? room : READ_SIZE, 0);
        if (got < 0 && errno == EAGAIN)
            break;
        if (got <= 0) {
            drop(one);
            return;
        }
        one->in_size += got;
        if ((size_t)got < room && got < READ_SIZE)
            break;
    }
    requests(one);
}

static void writable(struct connection *one) {
    size_t size = one->out_size;
    char rest[OUT_SIZE];
    memcpy(rest, one->out, size);
    one->out_size = 0;
    if (send_out(one, rest, size) <= 0)
        return;
    watch(one, EPOLLIN | EPOLLRDHUP);
    if (one->chunks_left)
        queue_join(one, now_ns() + period_ns);
    else
        requests(one);
}

static void accept_all(int listener) {
    for (;;) {
        int descriptor = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (descriptor < 0) {
            if (errno == EAGAIN || errno == ECONNABORTED || errno == EINTR)
                return;
            fail("accept");
        }
        int on = 1;
        setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct connection *one = calloc(1, sizeof *one);
        if (!one)
            fail("memory");
        one->descriptor = descriptor;
        struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = one};
        if (epoll_ctl(epoll_descriptor, EPOLL_CTL_ADD, descriptor, &event) < 0)
            fail("epoll_ctl");
    }
}

static void send_due(void) {
    int64_t now = now_ns();
    while (queue_first && queue_first->next_ns <= now) {
        struct connection *one = queue_first;
        queue_leave(one);
        if (send_chunk(one, 0) <= 0)
            continue;
        if (one->chunks_left)
            queue_join(one, one->next_ns + period_ns);
        else
            requests(one);
    }
}

static int listen_at(uint32_t address, int port) {
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(address)};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (listener < 0 || bind(listener, (struct sockaddr *)&at, sizeof at) < 0 || listen(listener, 4096) < 0)
        fail("listen");
    return listener;
}

static void on_signal(int number) {
    (void)number;
    ended = 1;
}

int main(int count, char **arguments) {
    long port = 0, addresses = 1;
    double rate = 50;
    for (int at = 1; at < count; at += 2) {
        const char *name = arguments[at], *value = at + 1 < count ? arguments[at + 1] : "";
        if (!strcmp(name, "--port"))
            port = atol(value);
        else if (!strcmp(name, "--addresses"))
            addresses = atol(value);
        else if (!strcmp(name, "--rate"))
            rate = atof(value);
        else if (!strcmp(name, "--chunks"))
            chunks_default = atol(value);
        else if (!strcmp(name, "--content-type"))
            content_type = value;
        else
            port = 0, at = count;
    }
    if (port < 1 || port > 65535 || addresses < 1 || addresses > 60000 || rate <= 0 || chunks_default < 1) {
        fprintf(stderr, "usage: engine --port PORT [--addresses N] [--rate CHUNKS_PER_S] [--chunks N] [--content-type TYPE]\n");
        return 2;
    }
    period_ns = (int64_t)(1e9 / rate);
    memset(filler, 'x', sizeof filler - 1);
    for (size_t at = 6; at < sizeof filler - 1; at += 7)
        filler[at] = ' ';
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
    epoll_descriptor = epoll_create1(EPOLL_CLOEXEC);
    for (long number = 0; number < addresses; number++) {
        int listener = listen_at(0x7f000001 + (uint32_t)(number / 250 * 256 + number % 250), (int)port);
        /* An odd number marks a listener; a connection's address is even. */
        struct epoll_event event = {.events = EPOLLIN, .data.u64 = (uint64_t)listener << 1 | 1};
        epoll_ctl(epoll_descriptor, EPOLL_CTL_ADD, listener, &event);
    }
    printf("listening\n");
    fflush(stdout);
    struct epoll_event events[EVENTS];
    while (!ended) {
        struct timespec wait = {0}, *limit = NULL;
        if (queue_first) { /* to the microsecond: waits in whole milliseconds would send chunks in batches, which are cheaper to relay */
            int64_t left = queue_first->next_ns - now_ns();
            if (left > 0)
                wait = (struct timespec){.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
            limit = &wait;
        }
        int found = epoll_pwait2(epoll_descriptor, events, EVENTS, limit, NULL);
        if (found < 0 && errno != EINTR)
            fail("epoll_wait");
        for (int at = 0; at < found; at++) {
            if (events[at].data.u64 & 1) {
                accept_all((int)(events[at].data.u64 >> 1));
                continue;
            }
            struct connection *one = events[at].data.ptr;
            if (one->descriptor >= 0 && events[at].events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP))
                drop(one); /* a router that hangs up has aborted */
            if (one->descriptor >= 0 && events[at].events & EPOLLOUT)
                writable(one);
            if (one->descriptor >= 0 && events[at].events & EPOLLIN)
                readable(one);
        }
        send_due();
        while (closed) {
            struct connection *one = closed;
            closed = one->next;
            free(one->in);
            free(one);
        }
    }
    return 0;
}
