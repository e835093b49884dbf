// Streams, events and graphs on the CPU. Nothing of a lazy stream is done before somebody waits for it, and then no more than
// what that needs: what nobody was told to wait for is not there. An eager one does everything at once: what others still had
// to read is written over.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <vector>

namespace driver {

typedef std::function<void()> Work;
// How much of each lane of a capture is known to be done before.
typedef std::map<size_t, uint64_t> Known;
struct Stream;
struct Event;

// Where a stream is when so much of it is done; of no stream: past.
struct Point {
    Stream* stream = nullptr;
    uint64_t n = 0;

    bool is_past() const;
    void reach() const;
};

// What is recorded of a stream: work, or waiting for so much of a lane, or an event that each launch marks.
struct Step {
    size_t lane;
    Work work;
    size_t awaited;
    uint64_t until;
    Event* marked;
};

// Streams whose work is recorded together, a lane each, in the order in which it was enqueued.
struct Capture {
    std::vector<Stream*> streams;
    std::vector<uint64_t> enqueued;  // by lane
    std::vector<Step> steps;
    bool over = false, invalid = false;
};

// None ends before the program does: points in it may be known for longer than its handle.
struct Stream {
    int gpu;
    bool eager = false;
    std::deque<Work> queue;
    uint64_t enqueued = 0, done = 0;
    Capture* capture = nullptr;
    size_t lane = 0;
    Known known;

    Point end() { return {this, enqueued}; }
    void put(Work work) {
        if (capture) return record({lane, work, 0, 0, nullptr});
        queue.push_back(work);
        enqueued++;
        if (eager) end().reach();
    }
    void record(Step step) {
        capture->steps.push_back(step);
        known[lane] = ++capture->enqueued[lane];
    }
    // Adds the stream to a capture.
    void join(Capture* joined) {
        capture = joined;
        lane = capture->streams.size();
        known.clear();
        capture->streams.push_back(this);
        capture->enqueued.push_back(0);
    }
};

inline bool Point::is_past() const { return !stream || stream->done >= n; }
inline void Point::reach() const {
    while (!is_past()) {
        const Work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        work();
        stream->done++;
    }
}

struct Event {
    int gpu;
    Point point;
    // Where it was marked in a capture: only what is captured there may wait for it.
    Capture* capture = nullptr;
    size_t lane;
    uint64_t n;
    Known known;

    void mark(Stream* stream) {
        capture = stream->capture;
        if (!capture) {
            point = stream->end();
            return;
        }
        lane = stream->lane;
        n = capture->enqueued[lane];
        known = stream->known;
    }
    // Each launch of what is captured marks it.
    void mark_by_graph(Stream* stream) {
        capture = nullptr;
        stream->record({stream->lane, {}, 0, 0, this});
    }
    // Lets a stream that is captured, or begins to be so, wait.
    void hold_captured(Stream* stream) {
        if (!stream->capture) stream->join(capture);
        stream->record({stream->lane, {}, lane, n, nullptr});
        for (const auto& [other, done] : known) stream->known[other] = std::max(stream->known[other], done);
    }
};

// Ends a capture that began in this stream: whether all others have come back to it.
inline bool end_capture(Stream* stream) {
    Capture* const capture = stream->capture;
    bool joined = true;
    for (Stream* other : capture->streams) {
        joined &= stream->known[other->lane] == capture->enqueued[other->lane];
        other->capture = nullptr;
    }
    capture->over = true;
    return joined;
}

// Enqueues what was captured as one piece of work: lanes are streams of their own. `late`: events are left as they were until
// the launch gets there.
inline void launch_graph(const std::vector<Step>& steps, size_t n_lanes, Stream* stream, bool late) {
    std::vector<Stream*> lanes;
    const Point start = stream->end();
    for (size_t i = 0; i < n_lanes; i++) {
        lanes.push_back(new Stream{stream->gpu});
        lanes[i]->put([=] { start.reach(); });
    }
    for (const Step& step : steps) {
        Stream* const lane = lanes[step.lane];
        const Point awaited = {lanes[step.awaited], step.until + 1}, here = {lane, lane->enqueued + 1};
        if (step.work) lane->put(step.work);
        else if (!step.marked) lane->put([=] { awaited.reach(); });
        else if (late) lane->put([=] { step.marked->point = here; });
        else lane->put([] {}), step.marked->point = here;
    }
    for (Stream* lane : lanes) stream->put([end = lane->end()] { end.reach(); });
}

}  // namespace driver
