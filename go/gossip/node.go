package gossip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"reflect"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/torchft/torchft/go/gossip/agree"
	"github.com/torchft/torchft/go/internal/rpc"
)

const (
	tick        = 250 * time.Millisecond // between checks of what is due to be sent
	reconnect   = 5 * time.Second        // between attempts to reach a member that failed
	repeatAfter = time.Second            // between two News with the same content
	joinPause   = 200 * time.Millisecond // between attempts to reach the seeds
	farewell    = 500 * time.Millisecond // longest wait for each announcement of a member that leaves
	// addresses of members that stopped answering, which are tried again
	mostFailed = 256
	// UpdateNode queues its message before it waits, so a short wait suffices
	announceBound = time.Millisecond
)

// ErrClosed is returned by calls on a closed node.
var ErrClosed = errors.New("gossip: the node is closed")

// TimeoutError is returned by View if the members did not agree in time. Waits is the reason.
type TimeoutError struct {
	After time.Duration
	Waits string
}

func (e *TimeoutError) Error() string {
	return fmt.Sprintf("list of members: timed out after %v: %s", e.After, e.Waits)
}

// Node is one member of a job.
type Node struct {
	cfg     Config
	id      agree.ID // open may raise its incarnation (Rise), and later nothing changes it
	name    string   // of the node, in memberlist
	log     *slog.Logger
	list    *memberlist.Memberlist
	keys    *keyring
	seeds   [][]string // each with all of its addresses
	own     string     // the announced "ip:port"
	address string     // the same with the host's name

	ctx     context.Context // until Close
	cancel  context.CancelFunc
	closing sync.Once
	tasks   sync.WaitGroup
	run     chan struct{} // closed when the background task has ended
	wake    chan struct{} // wakes the background task when there is something to send

	mu       sync.Mutex
	machine  *agree.Machine
	peers    map[string]peer // by the name of the node, which stays when the incarnation rises
	failed   map[string]bool // addresses of members that stopped answering
	changed  chan struct{}   // closed, and replaced by a new one, at each change
	sent     agree.News      // the last result of News
	sentAt   time.Time
	announce bool // the own note has to be announced
}

// peer is a node of memberlist's list.
type peer struct {
	agree.ID
	agree.Peer
}

// Open starts a node. If there are other seeds, it connects to at least one of them within ConnectTimeout.
func Open(ctx context.Context, cfg Config) (*Node, error) {
	settings := cfg.settings()
	ctx, cancel := context.WithTimeout(ctx, cfg.ConnectTimeout)
	defer cancel()
	announced, err := resolve(ctx, net.JoinHostPort(cfg.Host, strconv.Itoa(cfg.Port)))
	if err != nil {
		return nil, fmt.Errorf("gossip: the announced host %q (TORCHFT_HOST) has no address: %w", cfg.Host,
			err)
	}
	seeds := make([][]string, 0, len(cfg.Seeds))
	for _, seed := range cfg.Seeds {
		found, err := resolve(ctx, seed)
		if err != nil {
			return nil, fmt.Errorf("gossip: seed %q has no address: %w", seed, err)
		}
		seeds = append(seeds, found)
	}
	w, err := memberlist.NewNetTransport(&memberlist.NetTransportConfig{
		BindAddrs: []string{""}, // all addresses, of both families
		BindPort:  cfg.Port,
		Logger:    settings.Logger,
	})
	if err != nil {
		return nil, fmt.Errorf("gossip: port %d of TCP and UDP cannot be used: %w", cfg.Port, err)
	}
	settings.Transport = w
	settings.AdvertiseAddr, _, _ = net.SplitHostPort(announced[0])
	settings.AdvertisePort = w.GetAutoBindPort()
	return open(ctx, cfg, settings, seeds, net.JoinHostPort(cfg.Host, strconv.Itoa(settings.AdvertisePort)))
}

// open is Open with a given transport, which the node closes.
func open(
	ctx context.Context, cfg Config, settings *memberlist.Config, seeds [][]string, address string,
) (_ *Node, err error) {
	n := &Node{
		cfg: cfg, id: cfg.id(), name: settings.Name, log: cfg.Log, address: address,
		own: net.JoinHostPort(settings.AdvertiseAddr, strconv.Itoa(settings.AdvertisePort)),
		run: make(chan struct{}), wake: make(chan struct{}, 1), changed: make(chan struct{}),
		peers: map[string]peer{}, failed: map[string]bool{},
	}
	if n.seeds = seeds; len(seeds) == 0 {
		n.seeds = [][]string{{n.own}}
	}
	n.machine = agree.New(agree.Config{Me: n.id, Address: cfg.StoreAddress, At: n.own, Seeds: n.seeds,
		MinMembers: cfg.MinMembers})
	protection, err := cfg.Security.Open(cfg.Log)
	if err == nil {
		n.keys, err = newKeyring(protection.Tokens)
	}
	if err != nil {
		_ = settings.Transport.Shutdown()
		return nil, err
	}
	if n.keys != nil {
		settings.Keyring = n.keys.Keyring
	}
	settings.Delegate, settings.Events = delegate{n}, events{n}
	if n.list, err = memberlist.Create(settings); err != nil {
		_ = settings.Transport.Shutdown()
		return nil, fmt.Errorf("gossip: %w", err)
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	rpc.Go(&n.tasks, n.log, "gossip", n.background)
	if err := n.join(ctx); err != nil {
		n.close(false)
		return nil, err
	}
	// After join, in which the machine learned which incarnation of this name is alive.
	n.step(func(m *agree.Machine) {
		if id := m.Rise(); id != n.id {
			n.id, n.announce = id, true
		}
	})
	return n, nil
}

// ID identifies this incarnation of the member.
func (n *Node) ID() agree.ID { return n.id }

// Address returns the "host:port" under which others can use this member as a seed.
func (n *Node) Address() string { return n.address }

// View waits until the members agree on a view that contains this one.
func (n *Node) View(ctx context.Context) (*agree.View, error) {
	began := time.Now()
	n.step(func(m *agree.Machine) { m.Ask() })
	for {
		n.mu.Lock()
		taken, replaced, waits, changed := n.machine.Taken(), n.machine.Replaced(), n.machine.Waits(),
			n.changed
		n.mu.Unlock()
		switch {
		case taken != nil:
			return taken, nil
		case replaced:
			return nil, fmt.Errorf("gossip: %s is no member any more: a later incarnation of it has taken "+
				"its place", n.id.Name)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			n.step(func(m *agree.Machine) { m.Cancel() })
			return nil, &TimeoutError{time.Since(began).Round(time.Millisecond), waits}
		case <-n.ctx.Done():
			return nil, ErrClosed
		}
	}
}

// News waits until there is news about the view that this member is in: a member failed, or processes want to
// join. While the news holds, it is returned again after repeatAfter: a caller that had not received the view
// yet may have ignored the news.
func (n *Node) News(ctx context.Context) (agree.News, error) {
	for {
		n.mu.Lock()
		news, changed, wait := n.machine.News(), n.changed, time.Hour
		if news.Ended != "" || len(news.Joining) > 0 {
			if wait = repeatAfter - time.Since(n.sentAt); wait <= 0 || !reflect.DeepEqual(news, n.sent) {
				n.sent, n.sentAt = news, time.Now()
				n.mu.Unlock()
				return news, nil
			}
		}
		n.mu.Unlock()
		select {
		case <-changed:
		case <-time.After(wait):
		case <-ctx.Done():
			return agree.News{}, ctx.Err()
		case <-n.ctx.Done():
			return agree.News{}, ErrClosed
		}
	}
}

// Close announces that this member leaves, so that the others need not detect its end, and closes the node.
func (n *Node) Close() error {
	n.close(true)
	return nil
}

func (n *Node) close(leave bool) {
	n.closing.Do(func() { n.end(leave) })
}

func (n *Node) end(leave bool) {
	n.cancel()
	<-n.run // otherwise the background task could announce an earlier note after the last one
	if leave {
		n.step(func(m *agree.Machine) { m.Leave() })
		// The last note promises that this member joins no further view: the members that receive it need not
		// wait for this one.
		_ = n.list.UpdateNode(farewell) // waits until the note is sent
		_ = n.list.Leave(farewell)      // if it fails, the others detect the end themselves
	}
	_ = n.list.Shutdown()
	n.tasks.Wait()
}

// step changes the machine, and wakes the background task if the note has changed. It sends nothing itself:
// memberlist holds a lock while it reports events.
func (n *Node) step(happens func(m *agree.Machine)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	note := n.machine.Note()
	happens(n.machine)
	if n.machine.Note() != note {
		n.announce = true
	}
	close(n.changed)
	n.changed = make(chan struct{})
	if n.announce {
		select {
		case n.wake <- struct{}{}:
		default:
		}
	}
}

// background sends the messages that are due. While it runs, no other goroutine updates the keys or announces
// this member's note: end announces the last note after background has ended.
func (n *Node) background() {
	defer close(n.run)
	ticks := time.Tick(tick)
	reconnected := time.Now()
	for {
		select {
		case <-n.wake:
		case <-ticks:
		case <-n.ctx.Done():
			return
		}
		if err := n.keys.refresh(); err != nil {
			n.log.Error("torchft: the gossip keys were not updated; gossip continues with the previous ones",
				"error", err)
		}
		n.mu.Lock()
		announce := n.announce
		n.announce = false
		n.mu.Unlock()
		if announce {
			_ = n.list.UpdateNode(announceBound) // after an error the message is still queued
		}
		if time.Since(reconnected) >= reconnect {
			n.reconnect()
			reconnected = time.Now()
		}
	}
}
