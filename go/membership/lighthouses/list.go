package lighthouses

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

const (
	// attemptTimeout is how long one of several lighthouses may take to answer before the next one is tried.
	attemptTimeout = time.Second
	// unacknowledged is the time without a TCP acknowledgement after which the connection to one of several lighthouses is
	// closed. A bound member sends a message every 0.54 s (quorum.BondTime / quorum.StampsInBond). So it notices within 0.54 s +
	// 1.2 s = 1.74 s that a host has vanished. The bond to this host runs out later: after at least 1.89 s, which is
	// quorum.BondTime less one and a half of these intervals. gRPC's pings would take 20 s.
	unacknowledged = 1200 * time.Millisecond
	// openTimeout bounds opening a stream that no call waits for.
	openTimeout = 10 * time.Second
	// failoverAfter is how long after an outage began only the lighthouse that served last is tried: its restart must not cause a
	// failover.
	failoverAfter = time.Second
	// probeEvery is how often a member of a later lighthouse probes the earlier ones of the list. The member reports the ones
	// that it reached twice in a row to its lighthouse, which decides when all members fail back.
	probeEvery = time.Second
	// avoidFor is how long a lighthouse is not tried after it refused because it has too few members, or accepted a connection
	// and did not answer. The time doubles with each such failure in a row, at most avoidDoublings times.
	avoidFor       = 10 * time.Second
	avoidDoublings = 5
)

// lighthouses is a job's list of lighthouses, in order, with a client for each that has been reached.
type lighthouses struct {
	addresses []string
	options   []DialOption

	mu      sync.Mutex
	clients []*Client
	closed  bool
}

// dialLighthouses connects to the first lighthouse of a list that it reaches, and returns its place.
func dialLighthouses(ctx context.Context, addresses string, connectTimeout time.Duration, options []DialOption) (l *lighthouses, at int, err error) {
	list, err := rpc.ParseAddresses("lighthouse address", addresses)
	if err != nil {
		return nil, 0, status.Error(codes.InvalidArgument, err.Error())
	}
	if len(list) > 1 {
		options = append(slices.Clone(options), WithNetwork(rpc.WithUserTimeout(cmp.Or(settingsOf(options).network, rpc.TCP), unacknowledged)))
	}
	first, err := Dial(ctx, addresses, connectTimeout, options...)
	if err != nil {
		return nil, 0, err
	}
	l = &lighthouses{addresses: list, options: options, clients: make([]*Client, len(list))}
	at, first.of = slices.Index(list, first.addr), len(list)
	l.clients[at] = first
	return l, at, nil
}

// reach returns the client of lighthouse i, and connects first if there is none yet.
func (l *lighthouses) reach(ctx context.Context, i int) (*Client, error) {
	if c := l.client(i); c != nil {
		return c, nil
	}
	c, err := dialOne(ctx, l.addresses[i], attemptTimeout, l.options)
	if status.Code(err) == codes.InvalidArgument {
		// The settings were valid when the first lighthouse was reached, so a file is being replaced: another attempt may succeed.
		err = status.Error(codes.Unavailable, rpc.Message(err))
	}
	if err != nil {
		return nil, err
	}
	c.of = len(l.addresses)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return nil, errors.Join(status.Error(codes.Canceled, "the client is closed"), c.Close())
	case l.clients[i] != nil: // a concurrent call was faster
		return l.clients[i], c.Close()
	}
	l.clients[i] = c
	return c, nil
}

func (l *lighthouses) client(i int) *Client {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.clients[i]
}

// isBack reports whether lighthouse i answers. An idle connection may seem fine for long after the host has vanished, also after that was
// restarted: if the members failed back to it, those with such a connection would stay, and the job would be split. Any answer will do: no
// lighthouse has this method, nor has a proxy before it.
func (l *lighthouses) isBack(ctx context.Context, i int) bool {
	c, err := l.reach(ctx, i)
	if err != nil {
		return false
	}
	err = c.conn.Invoke(ctx, "/"+torchftpb.MemberService_ServiceDesc.ServiceName+"/IsBack", &emptypb.Empty{}, &emptypb.Empty{})
	return err == nil || status.Code(err) == codes.Unimplemented
}

// there returns which of the given lighthouses answer.
func (l *lighthouses) there(ctx context.Context, places []int) (there quorum.Places) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	back := make([]bool, len(places))
	var looks sync.WaitGroup
	for at, place := range places {
		looks.Go(func() { back[at] = l.isBack(ctx, place) })
	}
	looks.Wait()
	for at, place := range places {
		if back[at] {
			there |= quorum.PlacesOf(place)
		}
	}
	return there
}

// ended reports whether the process of a lighthouse has ended for certain: its host refuses connections.
func (l *lighthouses) ended(ctx context.Context, i int) bool {
	address, err := rpc.ParseAddress("lighthouse address", l.addresses[i])
	if err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	return rpc.Refuses(ctx, cmp.Or(settingsOf(l.options).network, rpc.TCP), address.HostPort)
}

func (l *lighthouses) close() (err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, c := range l.clients {
		if c != nil {
			err = errors.Join(err, c.Close())
		}
	}
	return err
}

// choice decides which lighthouse of a list is asked. It does no IO, and takes the time as an argument.
type choice struct {
	at      int           // place of the lighthouse that served last, or was tried last
	broke   time.Time     // when its stream broke, or when the first attempt to reach it failed; zero: it serves
	silent  bool          // since then an attempt to reach it, or the member's bond to it, has run out without an answer
	back    int           // place of the earlier lighthouse that all members fail back to; -1: none
	sees    quorum.Places // earlier lighthouses that the last probe has reached
	avoid   []time.Time   // until when each lighthouse is avoided; zero: not avoided
	refused []int         // how often in a row each has refused because it has too few members, or has not answered
	served  bool          // a lighthouse has served since the start, or the list has only one
}

func newChoice(at, of int) choice {
	return choice{at: at, back: -1, avoid: make([]time.Time, of), refused: make([]int, of), served: of == 1}
}

// outlasted reports whether the lighthouse that served last has been unreachable for so long (failoverAfter) that others may be
// tried.
func (c *choice) outlasted(now time.Time) bool {
	return !c.broke.IsZero() && now.Sub(c.broke) >= failoverAfter
}

// order returns the places to try, in order. A member that is bound to the lighthouse that served last asks no other one: if the
// member ends while it is bound, its vote counts at that lighthouse, and must not count in a quorum of another one, too. Without a
// bond, too, only that lighthouse is tried at first, unless the members fail back, it is avoided, it did not answer, or its outage
// has lasted for failoverAfter.
func (c *choice) order(now time.Time, bound bool) []int {
	if bound || c.served && c.back < 0 && !c.avoided(c.at, now) && !c.silent && !c.outlasted(now) {
		return []int{c.at}
	}
	var first, order, silent, avoided []int
	for i := range c.avoid {
		switch {
		case i == c.back:
			first = append(first, i)
		case c.silent && i == c.at:
			// A silent one is tried after the others, since it may take all of attemptTimeout again. One that was not silent keeps
			// its place: if its process has ended, its host refuses at once, and a new process may serve there already.
			silent = append(silent, i)
		case c.avoided(i, now):
			avoided = append(avoided, i)
		default:
			order = append(order, i)
		}
	}
	return slices.Concat(first, order, silent, avoided) // avoided ones last, in case no other one answers
}

func (c *choice) avoided(i int, now time.Time) bool { return now.Before(c.avoid[i]) }

// shun avoids a lighthouse for a while, longer each time in a row.
func (c *choice) shun(i int, now time.Time) {
	c.avoid[i] = now.Add(avoidFor << min(c.refused[i], avoidDoublings))
	c.refused[i]++
}

// arrived records that the lighthouse at this place is asked from now on. If it is another one than before, the result of the
// last probe does not count any more.
func (c *choice) arrived(at int) {
	if c.at != at {
		c.sees = 0
	}
	c.at, c.back, c.served, c.broke, c.silent = at, -1, true, time.Time{}, false
}

// failBack records that all members fail back to an earlier lighthouse. It is not avoided any more: it will have enough members.
func (c *choice) failBack(place int) { c.back, c.avoid[place] = place, time.Time{} }

// failed records a failed attempt. silent: it ended without any answer.
func (c *choice) failed(i int, now time.Time, silent bool) {
	c.silent = c.silent || silent && i == c.at
	if i == c.back { // the members could connect, but it does not serve: avoid it, or they would fail back to it over and over
		c.back = -1
		c.shun(i, now)
	}
}

// lookAt returns the earlier lighthouses to probe.
func (c *choice) lookAt(now time.Time) (places []int) {
	for i := range c.at {
		if !c.avoided(i, now) {
			places = append(places, i)
		}
	}
	return places
}

// looked handles the result of a probe, and returns the earlier lighthouses that both this probe and the previous one have reached.
func (c *choice) looked(there quorum.Places) quorum.Places {
	there &= quorum.Before(c.at) // since lookAt, the member may have moved to one of these places, or to an earlier one
	twice := there & c.sees
	c.sees = there
	return twice
}

// attempts has the errors of lighthouses that were tried one after the other.
type attempts []error

// err joins the errors. If one of them is a refusal, its code is used: it is more specific than that of a failed connection.
func (a attempts) err() error {
	code := codes.Unavailable
	var texts []string
	for _, err := range a {
		if c := status.Code(err); c != codes.Unavailable {
			code = c
		}
		texts = append(texts, rpc.Message(err))
	}
	return status.Error(code, strings.Join(texts, "; "))
}
