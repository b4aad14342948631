/* SPDX-License-Identifier: Apache-2.0 */
/* Enlarges one frame over D-Bus with sd-bus: the ring and the slot socket, as a player would use them.
 *
 *     cc -o video_sdbus video_sdbus.c $(pkg-config --cflags --libs libsystemd)
 *     video_sdbus [ADDRESS]            (without an address: the system bus)
 *
 * Writes a grey ramp of 64x48, I420, and prints the first output pixels and the device that made them.
 */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <systemd/sd-bus.h>

#define NAME "org.pvrd.Pvrd1"
enum { SUBMIT = 1, DONE = 2, CREDIT = 3, DROP = 4, ERROR = 5, MAX_PLANES = 4 };

/* The 64 bytes of the slot socket, little-endian; the fields fall on their offsets without padding. */
struct message {
    uint32_t magic;
    uint16_t version, type;
    uint64_t seq;
    uint32_t slot, status;
    int64_t pts;
    uint64_t deadline;
    uint32_t tiles, tiles_fallback;
    uint64_t work_ns;
    uint32_t device, credits;
};
_Static_assert(sizeof(struct message) == 64, "64 bytes");

struct plane {
    uint64_t offset;
    uint32_t stride, width, rows;
};
struct layout {
    uint64_t slot_bytes, ring_bytes;
    struct plane in[MAX_PLANES], out[MAX_PLANES];
    int n_in, n_out;
};

static void die(const char *what, int error) {
    fprintf(stderr, "%s: %s\n", what, strerror(error < 0 ? -error : error));
    exit(1);
}

static int read_planes(sd_bus_message *m, struct plane *planes) {
    int n = 0;
    sd_bus_message_enter_container(m, 'v', "a(tuuu)");
    sd_bus_message_enter_container(m, 'a', "(tuuu)");
    while (n < MAX_PLANES && sd_bus_message_read(m, "(tuuu)", &planes[n].offset, &planes[n].stride,
                                                 &planes[n].width, &planes[n].rows) > 0)
        n++;
    sd_bus_message_exit_container(m);
    sd_bus_message_exit_container(m);
    return n;
}

/* The layout is a dict; keys that we do not know are skipped, as the API asks. */
static void read_layout(sd_bus_message *m, struct layout *l) {
    const char *key;
    sd_bus_message_enter_container(m, 'a', "{sv}");
    while (sd_bus_message_enter_container(m, 'e', "sv") > 0) {
        sd_bus_message_read(m, "s", &key);
        if (!strcmp(key, "slot_bytes"))
            sd_bus_message_read(m, "v", "t", &l->slot_bytes);
        else if (!strcmp(key, "ring_bytes"))
            sd_bus_message_read(m, "v", "t", &l->ring_bytes);
        else if (!strcmp(key, "in_planes"))
            l->n_in = read_planes(m, l->in);
        else if (!strcmp(key, "out_planes"))
            l->n_out = read_planes(m, l->out);
        else
            sd_bus_message_skip(m, "v");
        sd_bus_message_exit_container(m);
    }
    sd_bus_message_exit_container(m);
}

static sd_bus *connect_bus(const char *address) {
    sd_bus *bus = NULL;
    int r;
    if (!address || !strcmp(address, "system")) {
        if ((r = sd_bus_open_system(&bus)) < 0)
            die("system bus", r);
        return bus;
    }
    if ((r = sd_bus_new(&bus)) < 0 || (r = sd_bus_set_address(bus, address)) < 0)
        die("bus address", r);
    sd_bus_set_bus_client(bus, 1);
    sd_bus_negotiate_fds(bus, 1);
    if ((r = sd_bus_start(bus)) < 0)
        die("bus", r);
    return bus;
}

int main(int argc, char **argv) {
    sd_bus *bus = connect_bus(argc > 1 ? argv[1] : getenv("PVRD_BUS"));
    sd_bus_error error = SD_BUS_ERROR_NULL;
    sd_bus_message *reply = NULL;
    struct layout layout = {0};
    struct message msg;
    const char *session;
    uint8_t *ring;
    int r, ring_fd, sock;

    r = sd_bus_call_method(bus, NAME, "/org/pvrd/Pvrd1", NAME ".Manager", "OpenVideo", &error, &reply, "a{sv}", 2,
                           "width", "u", (uint32_t)64, "height", "u", (uint32_t)48);
    if (r < 0) {
        fprintf(stderr, "OpenVideo: %s\n", error.message);
        return 1;
    }
    if ((r = sd_bus_message_read(reply, "ohh", &session, &ring_fd, &sock)) < 0)
        die("reply", r);
    read_layout(reply, &layout);
    if (layout.n_in < 3 || layout.n_out < 3 || !layout.ring_bytes)
        die("layout", EINVAL);

    ring = mmap(NULL, layout.ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring_fd, 0);
    if (ring == MAP_FAILED)
        die("mmap", errno);
    for (int p = 0; p < layout.n_in; p++) /* slot 0 begins at 0 */
        for (uint32_t y = 0; y < layout.in[p].rows; y++)
            for (uint32_t x = 0; x < layout.in[p].width; x++)
                ring[layout.in[p].offset + (size_t)y * layout.in[p].stride + x] = p ? 128 : (uint8_t)(16 + 3 * x);

    if (recv(sock, &msg, sizeof msg, 0) != sizeof msg || msg.type != CREDIT) /* pvrd speaks first */
        die("no credit", EPROTO);
    msg = (struct message){.magic = 0x53525650, .version = 1, .type = SUBMIT, .seq = 1, .slot = 0, .pts = 40};
    if (send(sock, &msg, sizeof msg, MSG_NOSIGNAL) != sizeof msg)
        die("send", EPIPE);
    do
        if (recv(sock, &msg, sizeof msg, 0) != sizeof msg)
            die("pvrd closed the session", EPIPE);
    while (msg.type == CREDIT);
    if (msg.type != DONE) {
        fprintf(stderr, "no frame: type %u, status %u\n", msg.type, msg.status);
        return 1;
    }
    printf("frame %llu on the %s, %ux%u:", (unsigned long long)msg.seq, msg.device == 1 ? "gpu" : "cpu",
           layout.out[0].width, layout.out[0].rows);
    for (int x = 40; x < 48; x++)
        printf(" %u", ring[layout.out[0].offset + 10 * (size_t)layout.out[0].stride + (size_t)x]);
    printf("\n");

    sd_bus_call_method(bus, NAME, session, NAME ".VideoSession", "Close", NULL, NULL, "");
    sd_bus_message_unref(reply); /* closes ring_fd and sock, which belong to it */
    sd_bus_flush_close_unref(bus);
    return 0;
}
