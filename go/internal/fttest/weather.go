package fttest

import (
	"context"
	"net"
	"strings"
	"time"
)

// This file delays and holds connections without breaking them. TCP retransmits lost data: after a cut, or
// after a pause of a machine, everything arrives late, unless one side has closed the connection meanwhile.

// direction is the direction from one machine to another.
type direction struct{ from, to string }

// machineOf returns a host's machine: its name up to the first dot. So "a.1" and "a.2" are two processes on
// a.
func machineOf(host string) string {
	machine, _, _ := strings.Cut(host, ".")
	return machine
}

// Delays sets the one-way delay between hosts for new connections. Connecting takes one delay in each
// direction. delay may be called at any time, from many goroutines.
func (n *Network) Delays(delay func(from, to string) time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.delay = delay
}

// Sever holds all data from one machine to another until Heal was called as often as Sever.
func (n *Network) Sever(from, to string) {
	n.hold(1, func() { n.cuts[direction{from, to}]++ }, isBetween(from, to))
}

// Heal undoes one Sever.
func (n *Network) Heal(from, to string) {
	n.hold(-1, func() {
		n.cuts[direction{from, to}]--
		n.wakeDialers()
	}, isBetween(from, to))
}

func isBetween(from, to string) func(direction) bool {
	return func(d direction) bool { return d == direction{from, to} }
}

// Pause stops a machine as seen from outside, until Resume was called as often: its kernel accepts
// connections, but nothing is read or sent. Timers of its processes continue.
func (n *Network) Pause(machine string) { n.hold(1, func() { n.paused[machine]++ }, isAt(machine)) }

// Resume undoes one Pause.
func (n *Network) Resume(machine string) { n.hold(-1, func() { n.paused[machine]-- }, isAt(machine)) }

func isAt(machine string) func(direction) bool {
	return func(d direction) bool { return d.from != d.to && (d.from == machine || d.to == machine) }
}

// hold changes how often the existing pipes are held; change does the same for later pipes.
func (n *Network) hold(by int, change func(), which func(direction) bool) {
	n.mu.Lock()
	change()
	var pipes []*pipe
	for p, d := range n.pipes {
		if which(d) {
			pipes = append(pipes, p)
		}
	}
	n.mu.Unlock()
	for _, p := range pipes {
		p.hold(by)
	}
}

// off is how often the pipes of a host without power are held: so often that no number of Heal and Resume
// releases them.
const off = 1 << 30

// Vanish cuts the power of a host: it sends nothing any more, not even the end of a connection, and answers
// nothing until Refuse.
func (h *Host) Vanish() {
	n := h.net
	n.mu.Lock()
	n.silent[h.name] = true
	var pipes []*pipe
	for c := range n.conns {
		if c.host.name == h.name {
			pipes = append(pipes, c.in, c.out)
		}
	}
	n.mu.Unlock()
	for _, p := range pipes {
		p.hold(off)
	}
	h.Kill()
}

// Refuse restarts the machine of a vanished host without its process: it refuses connections.
func (h *Host) Refuse() {
	h.net.mu.Lock()
	defer h.net.mu.Unlock()
	h.net.answer(h.name)
}

// answer makes a silent host answer again. The caller holds mu.
func (n *Network) answer(host string) {
	if !n.silent[host] {
		return
	}
	delete(n.silent, host)
	n.wakeDialers()
	for c := range n.conns {
		// the restarted host does not know its earlier connections: it answers data on them with a reset
		if to, _, _ := net.SplitHostPort(c.remote.String()); to == host {
			c.out.change(func() { c.out.unknown = true })
		}
	}
}

// wakeDialers wakes the pending handshakes, which check the network again. The caller holds mu.
func (n *Network) wakeDialers() {
	close(n.healed)
	n.healed = make(chan struct{})
}

// Reset breaks the connections between two machines, on both ends. New ones can be made.
func (n *Network) Reset(a, b string) {
	n.mu.Lock()
	var conns []*conn
	for c := range n.conns {
		other, _, _ := net.SplitHostPort(c.remote.String())
		if at, other := machineOf(c.host.name),
			machineOf(other); at == a && other == b || at == b && other == a {
			conns = append(conns, c)
		}
	}
	n.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
	}
}

// handshake returns when a connection can begin: neither host is silent, no direction is cut, and both delays
// have passed.
func (n *Network) handshake(ctx context.Context, from, to string) error {
	d := direction{machineOf(from), machineOf(to)}
	for {
		n.mu.Lock()
		away := n.silent[to] || n.cuts[d] > 0 || n.cuts[direction{d.to, d.from}] > 0
		healed, delay := n.healed, n.delay
		n.mu.Unlock()
		if !away {
			if delay == nil {
				return nil
			}
			select {
			case <-time.After(delay(from, to) + delay(to, from)):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		select {
		case <-healed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// pipe returns one direction of a new connection. The caller holds mu.
func (n *Network) pipe(from, to string) *pipe {
	var delay func() time.Duration
	if of := n.delay; of != nil {
		delay = func() time.Duration { return of(from, to) }
	}
	d := direction{machineOf(from), machineOf(to)}
	held := n.cuts[d]
	if d.from != d.to {
		held += n.paused[d.from] + n.paused[d.to]
	}
	p := newPipe(held, delay)
	n.pipes[p] = d
	return p
}
