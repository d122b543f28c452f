package dashboard

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
)

// job provides a status, like a job of a lighthouse.
type job struct {
	mu     sync.Mutex
	status Status
	asked  int // number of calls of current
}

func (j *job) set(members ...Member) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.status = Status{Status: quorum.Status{QuorumID: 3}, Members: members}
}

func (j *job) current() Status {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.asked++
	return j.status
}

// site is a feed behind a server on in-memory connections.
type site struct {
	*Feed
	client *http.Client
}

func serve(t *testing.T, j *job) *site {
	t.Helper()
	f := NewFeed("default", false, j.current)
	stop := make(chan struct{})
	mux := http.NewServeMux()
	f.Register(mux)
	lis := &pipes{conns: make(chan net.Conn), done: make(chan struct{})}
	server := &http.Server{Handler: mux}
	var tasks sync.WaitGroup
	tasks.Go(func() { f.Run(stop) })
	tasks.Go(func() { _ = server.Serve(lis) })
	transport := &http.Transport{DialContext: lis.dial}
	t.Cleanup(func() {
		close(stop)
		_ = server.Close()
		transport.CloseIdleConnections()
		tasks.Wait()
	})
	return &site{Feed: f, client: &http.Client{Transport: transport}}
}

// pipes is a listener for net.Pipe, which a fake clock can follow.
type pipes struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}
func (p *pipes) Close() error   { p.once.Do(func() { close(p.done) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }
func (p *pipes) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	here, there := net.Pipe()
	select {
	case p.conns <- there:
		return here, nil
	case <-p.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *site) get(t *testing.T, path string) (int, string, http.Header) {
	t.Helper()
	resp, err := s.client.Get("http://lighthouse" + path)
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return resp.StatusCode, string(body), resp.Header
}

// stream reads server-sent events.
type stream struct {
	body  io.ReadCloser
	lines *bufio.Reader
}

func (s *site) watch(t *testing.T, path, lastID string) *stream {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://lighthouse"+path, nil)
	require.NoError(t, err)
	if lastID != "" {
		req.Header.Set("Last-Event-ID", lastID)
	}
	resp, err := s.client.Do(req)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Equal(t, "text/event-stream", resp.Header.Get("Content-Type"))
	t.Cleanup(func() { _ = resp.Body.Close() })
	return &stream{resp.Body, bufio.NewReader(resp.Body)}
}

func (s *stream) next(t *testing.T, data any) (event, id string) {
	t.Helper()
	for {
		line, err := s.lines.ReadString('\n')
		require.NoError(t, err)
		name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		switch name {
		case "event":
			event = value
		case "id":
			id = value
		case "data":
			require.NoError(t, json.Unmarshal([]byte(value), data))
		case "":
			return event, id
		}
	}
}

type everything struct {
	Change
	Events []Event `json:"events"`
	Points []Point `json:"points"`
}

func TestAViewerGetsEverythingThenChangesThenEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &job{}
		j.set(member("a", 1), member("b", 1))
		s := serve(t, j)
		s.Record(Event{Kind: QuorumChanged, Joined: []string{"a", "b"}})
		s.Round(1, 2, 0, time.Now())

		viewer := s.watch(t, "/api/v1/events", "")
		var all everything
		event, id := viewer.next(t, &all)
		assert.Equal(t, "whole", event)
		assert.Equal(t, "1", id)
		assert.Len(t, all.Rows, 2)
		assert.Len(t, all.Events, 1)
		assert.Len(t, all.Points, 1)

		j.set(member("a", 2))
		var change Change
		event, _ = viewer.next(t, &change)
		assert.Equal(t, "change", event)
		assert.Equal(t, []string{"b"}, change.Removed)
		require.Len(t, change.Rows, 1)
		assert.EqualValues(t, 2, change.Rows[0].Step)
		assert.Equal(t, &Point{At: time.Now().UnixMilli(), Step: 1, Groups: 2}, change.Point,
			"the time is that of the lighthouse")

		s.Record(Event{Kind: MemberFailed, Left: []string{"b"}})
		var failed Event
		event, id = viewer.next(t, &failed)
		assert.Equal(t, "event", event)
		assert.Equal(t, "2", id)
		assert.Equal(t, []string{"b"}, failed.Left)

		// A browser that reconnects receives only new events.
		var again everything
		s.watch(t, "/api/v1/events", "1").next(t, &again)
		require.Len(t, again.Events, 1)
		assert.EqualValues(t, 2, again.Events[0].ID)
	})
}

func TestTheFirstViewerSeesSinceWhen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &job{}
		s := serve(t, j)
		began := time.Now()
		j.set(member("a", 1))
		for step := range int64(60) {
			s.Round(step, 1, 0, time.Now())
			time.Sleep(time.Second)
		}
		j.mu.Lock()
		assert.InDelta(t, time.Minute/lookUnseen, j.asked, 1, "without viewers it looks rarely")
		j.mu.Unlock()
		var all everything
		s.watch(t, "/api/v1/events", "").next(t, &all)
		require.Len(t, all.Rows, 1)
		assert.LessOrEqual(t, all.Rows[0].Since, began.Add(lookUnseen).UnixMilli())
		assert.LessOrEqual(t, all.Head.QuorumSince, began.Add(lookUnseen).UnixMilli())
	})
}

func TestTooManyViewersAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, &job{})
		s.mu.Lock()
		for range mostViewers {
			s.viewers[&viewer{messages: make(chan []byte, 1<<10)}] = struct{}{}
		}
		s.mu.Unlock()
		code, body, header := s.get(t, "/api/v1/events")
		assert.Equal(t, http.StatusServiceUnavailable, code)
		assert.Contains(t, body, "2000 viewers")
		assert.Equal(t, "5", header.Get("Retry-After"))
	})
}

func TestShutdownEndsTheStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, &job{})
		viewer := s.watch(t, "/api/v1/events", "")
		viewer.next(t, &everything{})
		s.close()
		_, err := io.ReadAll(viewer.lines)
		assert.NoError(t, err)
		code, body, _ := s.get(t, "/api/v1/events")
		assert.Equal(t, http.StatusServiceUnavailable, code)
		assert.Contains(t, body, "shutting down")
	})
}

func TestEmptyListsAreNotNull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, &job{})
		_, body, _ := s.get(t, "/api/v1/history")
		assert.JSONEq(t, `{"events": [], "points": []}`, body)
		viewer, err := s.join(0)
		require.NoError(t, err)
		assert.NotContains(t, string(viewer.whole.message()), "null")
		s.leave(viewer)
	})
}

func TestAnErrorIsJSONWithAReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, &job{})
		for path, want := range map[string]struct {
			code      int
			wantError string
		}{
			"/api/v1/history?after=-1": {400,
				`after="-1" is not allowed; allowed: a whole number of at least 0`},
			"/api/v1/history?after=1e3": {400, `after="1e3" is not allowed`},
			"/api/v1/events?after=x":    {400, `after="x" is not allowed`},
			"/api/v1/nothing":           {404, "there is no GET /api/v1/nothing"},
		} {
			code, body, header := s.get(t, path)
			var answer struct{ Error string }
			require.NoError(t, json.Unmarshal([]byte(body), &answer), body)
			assert.Equal(t, want.code, code, path)
			assert.Contains(t, answer.Error, want.wantError)
			assert.Equal(t, "application/json", header.Get("Content-Type"))
		}
	})
}

func TestAThousandGroupsFitIntoAMegabyte(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &job{}
		var members []Member
		for i := range 1000 {
			m := member(fmt.Sprintf("train_%d:5f9c3f0e-9a51-4f0b-8a57-2a4f6d1c7e11", i), 123456789)
			m.Address = "http://host-with-a-long-name.example.com:29600"
			members = append(members, m)
		}
		j.set(members...)
		s := serve(t, j)
		for i := range 2 * mostEvents {
			s.Record(Event{Kind: QuorumChanged, Joined: []string{members[i%1000].ReplicaID},
				Reason: "every healthy member asked"})
		}
		for i := range 3 * mostPoints {
			s.Round(int64(i), 1000, 0, start.Add(time.Duration(i)*time.Second))
		}
		viewer, err := s.join(0)
		require.NoError(t, err)
		assert.Less(t, len(viewer.whole.message()), 1<<20)
		s.leave(viewer)
	})
}

func TestThePageIsCompleteAndLoadsNothingFromOtherHosts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, &job{})
		for path, kind := range map[string]string{"/": "text/html", "/app.js": "text/javascript",
			"/style.css": "text/css"} {
			code, body, header := s.get(t, path)
			assert.Equal(t, http.StatusOK, code, path)
			assert.Contains(t, header.Get("Content-Type"), kind)
			assert.Contains(t, header.Get("Content-Security-Policy"), "default-src 'none'")
			// the name of an XML namespace, which is not loaded
			without := strings.ReplaceAll(body, "http://www.w3.org/2000/svg", "")
			assert.NotContains(t, without, "http://", path)
			assert.NotContains(t, without, "https://", path)
			assert.NotContains(t, without, "innerHTML", "names come from clients")
		}
	})
}
