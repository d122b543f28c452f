package dashboard

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/torchft/torchft/go/quorum"
)

const (
	// lookEvery is how often viewers are sent changes.
	lookEvery = time.Second
	// lookUnseen is about how often a feed without viewers looks, since a status takes the job's lock. The
	// time since when a member is in its state is late by at most that.
	lookUnseen = 10 * time.Second
	// mostViewers is how many viewers a job may have (docs/operating.md).
	mostViewers = 2000
	// backlog is how many messages are queued for a slow viewer. With more, its connection is closed, and the
	// browser reconnects.
	backlog = 16
	// keepWrite is how long sending one message to a viewer may take.
	keepWrite = 10 * time.Second
)

// Feed is the history and the board of a job, and its viewers. It is safe for concurrent use, and its methods
// do not wait for viewers.
type Feed struct {
	job    string
	status func() Status

	mu      sync.Mutex
	history History
	board   Board
	viewers map[*viewer]struct{}
	// first messages for viewers that join before the next change, by the last event that they know
	wholes map[int64]*whole
	closed bool
	looked time.Time
	meters *meters
}

type viewer struct {
	whole    *whole      // its first message
	messages chan []byte // closed when it is dropped
}

// whole is the full state at a moment. Viewers that connect at the same time share it: a thousand may do so
// after a restart of the lighthouse. It is encoded once, and not under the feed's lock.
type whole struct {
	once sync.Once
	last int64 // id of the last event
	data any   // nil once encoded
	text []byte
}

func (w *whole) message() []byte {
	w.once.Do(func() { w.text, w.data = message("whole", w.last, w.data), nil })
	return w.text
}

// NewFeed returns the feed of a job; status returns the present status of the job's machine. inCluster makes
// the page show the lighthouses of the cluster, which each of them describes at GET /cluster.
func NewFeed(job string, inCluster bool, status func() Status) *Feed {
	return &Feed{job: job, status: status, viewers: map[*viewer]struct{}{}, wholes: map[int64]*whole{},
		meters: newMeters(job), board: Board{cluster: inCluster}}
}

// Record stores an event and sends it to all viewers.
func (f *Feed) Record(e Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.meters.event(e)
	e = f.history.Add(e)
	clear(f.wholes)
	if len(f.viewers) > 0 {
		f.send(message("event", e.ID, e))
	}
}

// Notices returns what History.Notices does.
func (f *Feed) Notices() []Event {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.history.Notices()
}

// Failed counts the failure of a member. The event for the history is recorded separately, since it may name
// several members.
func (f *Feed) Failed(cause quorum.Cause) { f.meters.failures.WithLabelValues(string(cause)).Inc() }

// Heard counts a heartbeat.
func (f *Feed) Heard() { f.meters.heartbeats.Inc() }

// Round records the step of the job, and how long the quorum took since the first group asked for it.
func (f *Feed) Round(step int64, groups int, waited time.Duration, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.meters.round(waited)
	f.meters.stepped(f.history.Round(step, groups, now))
}

// Advanced records the step that a quorum that stands has come to.
func (f *Feed) Advanced(step int64, groups int, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.meters.stepped(f.history.Advanced(step, groups, now))
}

// Run looks at the job until stop is closed, and sends changes to viewers. It looks without viewers too,
// every lookUnseen: the rows show since when each member is in its state.
func (f *Feed) Run(stop <-chan struct{}) {
	ticks := time.Tick(lookEvery)
	for {
		select {
		case <-stop:
			f.close()
			return
		case <-ticks:
			if f.due() {
				f.look()
			}
		}
	}
}

func (f *Feed) due() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.viewers) > 0 || time.Since(f.looked) >= lookUnseen
}

// look gets the status before it locks the feed, to avoid a deadlock: a job calls Record under its own lock,
// which status needs.
func (f *Feed) look() {
	status := f.status()
	f.mu.Lock()
	defer f.mu.Unlock()
	if now := time.Now(); now.After(f.looked) {
		f.looked = now
		clear(f.wholes)
		change := f.board.Look(status, now)
		if f.history.latest.At != 0 {
			point := f.history.latest
			point.At = now.UnixMilli()
			change.Point = &point
		}
		if len(f.viewers) > 0 {
			f.send(message("change", 0, change))
		}
	}
}

// current updates the state for a new viewer, unless that was done a moment ago: an update for each of a
// thousand new viewers would send a thousand messages to each of the others.
func (f *Feed) current() {
	f.mu.Lock()
	fresh := time.Since(f.looked) < lookEvery
	f.mu.Unlock()
	if !fresh {
		f.look()
	}
}

// send queues a message for every viewer. The caller holds mu.
func (f *Feed) send(m []byte) {
	for v := range f.viewers {
		select {
		case v.messages <- m:
		default:
			f.drop(v)
		}
	}
}

func (f *Feed) drop(v *viewer) {
	if _, there := f.viewers[v]; there {
		delete(f.viewers, v)
		close(v.messages)
	}
}

func (f *Feed) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	for v := range f.viewers {
		f.drop(v)
	}
}

// join adds a viewer. Its first message is the full state: the members, the events after the given id, and
// the throughput.
func (f *Feed) join(after int64) (*viewer, error) {
	f.current()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, fmt.Errorf("the lighthouse is shutting down")
	}
	if len(f.viewers) >= mostViewers {
		return nil, fmt.Errorf("%d viewers are connected, and no more are allowed", mostViewers)
	}
	after = f.history.known(after)
	v := &viewer{whole: f.wholes[after], messages: make(chan []byte, backlog)}
	if v.whole == nil {
		v.whole = &whole{last: f.history.next, data: struct {
			Change
			// id of the last event; if a viewer knows a larger one, the lighthouse was restarted
			Last   int64   `json:"last"`
			Events []Event `json:"events"`
			Points []Point `json:"points"`
		}{f.board.Whole(), f.history.next, f.history.After(after), f.history.Points()}}
		f.wholes[after] = v.whole
	}
	f.viewers[v] = struct{}{}
	return v, nil
}

func (f *Feed) leave(v *viewer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.drop(v)
}

// snapshot returns the history for a single request.
func (f *Feed) snapshot(after int64) any {
	f.mu.Lock()
	defer f.mu.Unlock()
	return struct {
		Events []Event `json:"events"`
		Points []Point `json:"points"`
	}{f.history.After(after), f.history.Points()}
}

// serveEvents serves a stream of server-sent events.
func (f *Feed) serveEvents(w http.ResponseWriter, r *http.Request) {
	after, err := number(r, "after")
	if err != nil {
		Refuse(w, http.StatusBadRequest, err)
		return
	}
	if last, err := strconv.ParseInt(r.Header.Get("Last-Event-ID"), 10, 64); err == nil {
		after = last // set by a browser that reconnects
	}
	v, err := f.join(after)
	if err != nil {
		w.Header().Set("Retry-After", "5")
		Refuse(w, http.StatusServiceUnavailable, err)
		return
	}
	defer f.leave(v)
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // proxies must not buffer the stream
	out := http.NewResponseController(w)
	_ = out.SetReadDeadline(time.Time{})
	write := func(m []byte) bool {
		_ = out.SetWriteDeadline(time.Now().Add(keepWrite))
		_, err := w.Write(m)
		return err == nil && out.Flush() == nil
	}
	first := v.whole.message()
	v.whole = nil // do not keep it in memory while the viewer stays
	if !write(first) {
		return
	}
	for {
		select {
		case <-r.Context().Done():
			return
		case m, open := <-v.messages:
			if !open || !write(m) {
				return
			}
		}
	}
}

// message encodes a server-sent event; id 0: without an id.
func message(event string, id int64, data any) []byte {
	body, err := json.Marshal(data)
	if err != nil { // impossible: the value has numbers and strings only
		body = []byte(`{"error":"not encoded"}`)
	}
	m := []byte("event: " + event + "\n")
	if id > 0 {
		m = append(m, "id: "+strconv.FormatInt(id, 10)+"\n"...)
	}
	m = append(append(m, "data: "...), body...)
	return append(m, "\n\n"...)
}
