package fttest

import (
	"context"
	"net"
	"strings"
	"time"
)

// What a network does to connections without breaking them. TCP sends again what was lost: after a cut, or after a machine
// stood still, all arrives late, unless somebody has given the connection up meanwhile.

// direction is from one machine to another.
type direction struct{ from, to string }

// machineOf is a host's machine: its name up to the first dot. So "a.1" and "a.2" are two processes on a.
func machineOf(host string) string {
	machine, _, _ := strings.Cut(host, ".")
	return machine
}

// Delays says how long what one host sends takes to another, from now on, and a connection to be made. It may be
// called at any time, from many goroutines.
func (n *Network) Delays(delay func(from, to string) time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.delay = delay
}

// Sever cuts what one machine sends from another, until Heal as often.
func (n *Network) Sever(from, to string) {
	n.hold(1, func() { n.cuts[direction{from, to}]++ }, isBetween(from, to))
}

// Heal is the end of Sever.
func (n *Network) Heal(from, to string) {
	n.hold(-1, func() {
		n.cuts[direction{from, to}]--
		n.tellDialers()
	}, isBetween(from, to))
}

func isBetween(from, to string) func(direction) bool {
	return func(d direction) bool { return d == direction{from, to} }
}

// Pause lets a machine stand still, as seen from outside, until Resume as often: its kernel takes connections, and nothing
// is read or sent. Inside, time goes on.
func (n *Network) Pause(machine string) { n.hold(1, func() { n.paused[machine]++ }, isAt(machine)) }

// Resume is the end of Pause.
func (n *Network) Resume(machine string) { n.hold(-1, func() { n.paused[machine]-- }, isAt(machine)) }

func isAt(machine string) func(direction) bool {
	return func(d direction) bool { return d.from != d.to && (d.from == machine || d.to == machine) }
}

// hold changes how often pipes are held, and what those have that are made from now on.
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

// off is how often a pipe is held whose host has no power.
const off = 1 << 30

// Vanish is a power cut of a host: nothing more comes from it, no end of a connection either, and nothing answers there
// until Refuse.
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

// Refuse is that the machine of a host that vanished is there again, without its process: connections are refused.
func (h *Host) Refuse() {
	h.net.mu.Lock()
	defer h.net.mu.Unlock()
	h.net.answer(h.name)
}

// answer lets a host answer again. The caller holds mu.
func (n *Network) answer(host string) {
	if !n.silent[host] {
		return
	}
	delete(n.silent, host)
	n.tellDialers()
	for c := range n.conns { // what comes on a connection of before is answered with its end
		if to, _, _ := net.SplitHostPort(c.remote.String()); to == host {
			c.out.change(func() { c.out.unknown = true })
		}
	}
}

// tellDialers lets those look again that wait for a connection. The caller holds mu.
func (n *Network) tellDialers() {
	close(n.healed)
	n.healed = make(chan struct{})
}

// Reset breaks the connections between two machines, on both ends. New ones can be made.
func (n *Network) Reset(a, b string) {
	n.mu.Lock()
	var conns []*conn
	for c := range n.conns {
		other, _, _ := net.SplitHostPort(c.remote.String())
		if at, other := machineOf(c.host.name), machineOf(other); at == a && other == b || at == b && other == a {
			conns = append(conns, c)
		}
	}
	n.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
	}
}

// handshake waits as long as it takes to begin a connection.
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

// pipe makes one direction of a connection. The caller holds mu.
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
