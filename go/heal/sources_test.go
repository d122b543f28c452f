package heal

import (
	"context"
	"encoding/hex"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func clone(m *Memory) *Memory {
	c := &Memory{}
	for _, r := range m.regions {
		c.regions = append(c.regions, append([]byte(nil), r...))
	}
	return c
}

const small = 1 << 14 // block size in bytes in these tests

// If two groups have equal states, blocks are fetched from both.
func TestSeveralSourcesShareTheWork(t *testing.T) {
	source := filled(newRand(t), 1<<20, 100, 1<<20)
	target := empty(1<<20, 100, 1<<20)
	a, b := listen(t, time.Minute, 8<<20), listen(t, time.Minute, 8<<20)
	f := newFetch(t, target, Settings{BlockSize: small, Streams: 2})
	grantA, grantB := a.Grant(offer(t, source, small)), b.Grant(offer(t, clone(source), small))
	require.NoError(t, f.Add(address(a), grantA.Secret(), Assigned))
	require.NoError(t, f.Add(address(b), grantB.Secret(), Additional))
	status := wait(t, f)
	require.True(t, status.Done, status)
	requireSame(t, source, target)
	require.Positive(t, grantA.Served())
	require.Positive(t, grantB.Served())
}

// Blocks that differ come from the assigned source, whichever source was asked first.
func TestOnlyEqualBlocksComeFromAnAdditionalSource(t *testing.T) {
	rng := newRand(t)
	source := filled(rng, 1<<20)
	other := clone(source)
	for i := 0; i < len(other.regions[0]); i += 3 * small {
		other.regions[0][i]++
	}
	target := empty(1 << 20)
	a, b := listen(t, time.Minute, 16<<20), listen(t, time.Minute, 0)
	f := newFetch(t, target, Settings{BlockSize: small, Streams: 2})
	grant := b.Grant(offer(t, other, small))
	require.NoError(t, f.Add(address(a), a.Grant(offer(t, source, small)).Secret(), Assigned))
	require.NoError(t, f.Add(address(b), grant.Secret(), Additional))
	status := wait(t, f)
	require.True(t, status.Done, status)
	requireSame(t, source, target)
	require.Positive(t, grant.Served())
}

// A bad additional source must not fail the transfer: its blocks are fetched again from the assigned one.
func TestWrongBlocksOfAnAdditionalSourceDoNotFailTheTransfer(t *testing.T) {
	source := filled(newRand(t), 1<<20)
	other := clone(source)
	for i := range other.regions[0] {
		other.regions[0][i]++
	}
	const secret = "00112233445566778899aabbccddeeff"
	for name, add := range map[string]func(f *Fetch) error{
		"with checksums that fit the wrong blocks": func(f *Fetch) error {
			return f.Add(honestUntilTheEnd(t, other, false, nil), secret, Additional)
		},
		"with the right checksums": func(f *Fetch) error { // as if its memory had changed since
			o := offer(t, other, small)
			for block := range o.layout.Blocks() {
				require.NoError(t, o.note(block, checksum(source.regions[0][block*small:(block+1)*small])))
			}
			s := listen(t, time.Minute, 0)
			return f.Add(address(s), s.Grant(o).Secret(), Additional)
		},
	} {
		t.Run(name, func(t *testing.T) {
			target := empty(1 << 20)
			a := listen(t, time.Minute, 4<<20)
			f := newFetch(t, target, Settings{BlockSize: small, Streams: 2})
			require.NoError(t, add(f))
			require.NoError(t, f.Add(address(a), a.Grant(offer(t, source, small)).Secret(), Assigned))
			status := wait(t, f)
			for !status.Done && status.Failure == "" && status.Running {
				status = wait(t, f)
			}
			require.True(t, status.Done, status)
			requireSame(t, source, target)
			require.EqualValues(t, 1<<20, status.Received)
		})
	}
}

// A source that fails is replaced by another one. This holds for the assigned one, too, once its checksums
// are known.
func TestASourceThatFailsIsReplaced(t *testing.T) {
	for name, fails := range map[string]Role{"assigned": Assigned, "additional": Additional} {
		t.Run(name, func(t *testing.T) {
			source, target := filled(newRand(t), 4<<20), empty(4<<20)
			servers := map[Role]*Server{Assigned: listen(t, time.Minute, 2<<20),
				Additional: listen(t, time.Minute, 2<<20)}
			f := newFetch(t, target, Settings{BlockSize: small, Streams: 2})
			var grants []*Grant
			for role, s := range servers {
				g := s.Grant(offer(t, clone(source), small))
				grants = append(grants, g)
				require.NoError(t, f.Add(address(s), g.Secret(), role))
			}
			require.Eventually(t, func() bool { return grants[0].Served() > 0 && grants[1].Served() > 0 },
				time.Minute, time.Millisecond)
			servers[fails].Close()
			status := wait(t, f)
			for !status.Done && status.Running {
				status = wait(t, f)
			}
			require.True(t, status.Done, status)
			requireSame(t, source, target)
		})
	}
}

// When the only source fails, Wait returns. Blocks that have arrived are kept, and a new source sends the
// rest.
func TestATransferContinuesWithANewGrant(t *testing.T) {
	source, target := filled(newRand(t), 4<<20), empty(4<<20)
	s := listen(t, time.Minute, 16<<20)
	o := offer(t, source, small)
	f := newFetch(t, target, Settings{BlockSize: small, Streams: 2})
	grant := s.Grant(o)
	require.NoError(t, f.Add(address(s), grant.Secret(), Assigned))
	require.Eventually(t, func() bool { return grant.Served() > 1<<20 }, time.Minute, time.Millisecond)
	grant.Close()
	status := wait(t, f)
	require.False(t, status.Done)
	require.Contains(t, status.Failed[0], errEnded.Error())
	before := status.Received
	require.GreaterOrEqual(t, before, int64(1<<19))
	again := s.Grant(o)
	require.NoError(t, f.Add(address(s), again.Secret(), Assigned))
	status = wait(t, f)
	require.True(t, status.Done, status)
	require.Less(t, again.Served(), int64(4<<20)-before+8*small)
	requireSame(t, source, target)
}

// A block whose connection broke halfway is fetched again as a whole, and its bytes are not counted twice.
func TestReceivedCountsWholeBlocksOnce(t *testing.T) {
	const block = 4 * checkedSize
	source, target := filled(newRand(t), 2*block), empty(2*block)
	s := listen(t, time.Minute, block)
	o := offer(t, source, block)
	f := newFetch(t, target, Settings{BlockSize: block, Streams: 1})
	grant := s.Grant(o)
	require.NoError(t, f.Add(address(s), grant.Secret(), Assigned))
	require.Eventually(t, func() bool { return f.Status().Received%block != 0 }, time.Minute,
		time.Microsecond)
	grant.Close()
	require.False(t, wait(t, f).Done)
	require.Zero(t, f.Status().Received%block)
	require.NoError(t, f.Add(address(s), s.Grant(o).Secret(), Assigned))
	status := wait(t, f)
	require.True(t, status.Done, status)
	require.Equal(t, status.Total, status.Received)
	requireSame(t, source, target)
}

// Wait returns if only a failed source has the remaining blocks, so that the caller can add that source
// again.
func TestWaitEndsIfOnlyAFailedSourceHasTheRest(t *testing.T) {
	source, target := filled(newRand(t), 4<<20), empty(4<<20)
	other := clone(source)
	for i := 3 << 20; i < 4<<20; i += small {
		other.regions[0][i]++
	}
	a, b := listen(t, time.Minute, 2<<20), listen(t, time.Minute, 0)
	f := newFetch(t, target, Settings{BlockSize: small, Streams: 2})
	o := offer(t, source, small)
	grants := []*Grant{a.Grant(o), b.Grant(offer(t, other, small))}
	for i, s := range []*Server{a, b} {
		require.NoError(t, f.Add(address(s), grants[i].Secret(), Role(i)))
	}
	require.Eventually(t, func() bool { return grants[1].Served() > 0 }, time.Minute, time.Millisecond)
	grants[0].Close()
	status := wait(t, f)
	require.False(t, status.Done || status.Running, status)
	require.Contains(t, status.Failed[0]+status.Failed[1], errEnded.Error())
	// The other source has sent all blocks that are equal.
	require.GreaterOrEqual(t, status.Received, int64(3<<20))
	require.NoError(t, f.Add(address(a), a.Grant(o).Secret(), Assigned))
	require.True(t, wait(t, f).Done)
	requireSame(t, source, target)
}

func TestRevokeEndsReadersOfTheCallersMemoryOnly(t *testing.T) {
	source, target := filled(newRand(t), 1<<20, 1<<20), empty(1<<20, 1<<20)
	s, o := listen(t, time.Minute, 0), offer(t, source, small)
	copied := clone(source)
	o.copies[0] = partial{copied.regions[0], 1 << 20}
	require.True(t, o.Revoke(0, time.Second))
	f := newFetch(t, target, Settings{BlockSize: small, Streams: 1})
	require.NoError(t, f.Add(address(s), s.Grant(o).Secret(), Assigned))
	status := wait(t, f)
	require.False(t, status.Done)
	require.Contains(t, status.Failed[0], errRevoked.Error())
	o.mu.Lock()
	o.copies[1] = partial{copied.regions[1], 1 << 20}
	o.mu.Unlock()
	require.NoError(t, f.Add(address(s), s.Grant(o).Secret(), Assigned))
	require.True(t, wait(t, f).Done)
	requireSame(t, copied, target)
}

// A target that does not read does not delay the end of the offer, after which the owner may change the
// memory.
func TestASlowReaderIsCutOff(t *testing.T) {
	s, o := listen(t, time.Minute, 0), offer(t, filled(newRand(t), 64<<20), 0)
	g := s.Grant(o)
	conn := connected(t, s, g)
	for block := range o.layout.Blocks() {
		_, err := conn.Write(request{op: opBlock, block: uint32(block)}.append(nil))
		require.NoError(t, err)
	}
	last := int64(-1)
	require.Eventually(t, func() bool { // until nothing fits into the buffers any more
		stuck := g.Served() == last && last > 0
		last = g.Served()
		return stuck
	}, time.Minute, 50*time.Millisecond)
	start := time.Now()
	require.True(t, o.Revoke(10*time.Millisecond, time.Minute))
	require.Less(t, time.Since(start), 20*time.Second)
}

// A connection that waits for its share of a low rate does not delay the end of the server.
func TestTheEndDoesNotWaitForTheRate(t *testing.T) {
	const each = 10 // seconds that the rate allows for a block
	s, o := listen(t, time.Minute, small/each), offer(t, filled(newRand(t), 2*small), small)
	conn := connected(t, s, s.Grant(o))
	for block := range uint32(2) {
		_, err := conn.Write(request{op: opBlock, block: block}.append(nil))
		require.NoError(t, err)
	}
	// The first block comes at once, and the second one has to wait.
	_, err := io.ReadFull(conn, make([]byte, responseSize+small))
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		s.limit.mu.Lock()
		defer s.limit.mu.Unlock()
		return time.Until(s.limit.next) > each*time.Second // of both blocks
	}, each/2*time.Second, time.Millisecond)
	start := time.Now()
	s.Close()
	require.Less(t, time.Since(start), each/2*time.Second)
}

func TestUnauthorizedConnectionsAreRefused(t *testing.T) {
	s := listen(t, 200*time.Millisecond, 0)
	s.Grant(offer(t, filled(newRand(t), 1000), 0))
	for name, hello := range map[string]string{
		"garbage":      "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
		"wrong secret": magic + "0123456789abcdef",
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.Dial("tcp", address(s))
			require.NoError(t, err)
			defer conn.Close()
			_, err = conn.Write([]byte(hello))
			require.NoError(t, err)
			_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
			got, _ := io.ReadAll(conn)
			require.NotContains(t, string(got), "no such")
			require.Less(t, len(got), 100)
		})
	}
}

func TestMalformedRequestsEndTheConnection(t *testing.T) {
	s := listen(t, time.Minute, 0)
	o := offer(t, filled(newRand(t), 1000), 0)
	for name, r := range map[string]request{
		"operation": {op: 99},
		"block":     {op: opBlock, block: 7},
		"sums":      {op: opSums, block: 1, expected: 1<<32 - 1},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.Dial("tcp", address(s))
			require.NoError(t, err)
			defer conn.Close()
			g := s.Grant(o)
			_, err = conn.Write(r.append(append([]byte(magic), g.secret[:]...)))
			require.NoError(t, err)
			_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
			got, _ := io.ReadAll(conn)
			require.Empty(t, got)
		})
	}
}

// If a source's memory changes during the transfer, the checksums that it announces differ from those of the
// bytes that it sent.
func TestADigestThatDiffersIsAnError(t *testing.T) {
	memory := filled(newRand(t), 3*small)
	for name, changed := range map[string]bool{"the same": false, "another": true} {
		t.Run(name, func(t *testing.T) {
			target := empty(3 * small)
			f := newFetch(t, target, Settings{BlockSize: small, Streams: 1})
			require.NoError(t, f.Add(honestUntilTheEnd(t, memory, changed, nil),
				"00112233445566778899aabbccddeeff", Assigned))
			status := wait(t, f)
			require.Equal(t, !changed, status.Done)
			if !changed {
				requireSame(t, memory, target)
				return
			}
			require.Empty(t, status.Digest)
			require.Regexp(t, "^the state has the digest [0-9a-f]{32} here and [0-9a-f]{32} at the source$",
				status.Failure)
		})
	}
}

// Only additional sources may answer that a block differs. If the assigned source does, it is broken: the
// target must not ask it for ever.
func TestTheAssignedSourceMustSendItsBlocks(t *testing.T) {
	address := answering(t, func(r request) []byte { return response{statusDiffer, r.block, 0}.append(nil) })
	f := newFetch(t, empty(3*small), Settings{BlockSize: small, Streams: 1})
	require.NoError(t, f.Add(address, hex.EncodeToString(make([]byte, secretSize)), Assigned))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	status := f.Wait(ctx)
	require.False(t, status.Running)
	require.Len(t, status.Failed, 1)
	require.Contains(t, status.Failed[0], errGarbled.Error())
}

// honestUntilTheEnd serves blocks with correct checksums, and then other ones if they have changed. before is
// called with the operation of each request.
func honestUntilTheEnd(t *testing.T, memory *Memory, changed bool,
	before func(op uint32)) (address string) {
	t.Helper()
	l, err := NewLayout(memory.Sizes(), small)
	require.NoError(t, err)
	block := func(i uint32) []byte {
		begin := int64(i) * small
		return memory.regions[0][begin : begin+l.Length(int(i))]
	}
	var crcs []uint32
	for i := range l.Blocks() {
		crcs = append(crcs, checksum(block(uint32(i))))
	}
	if changed {
		crcs[1]++
	}
	return answering(t, func(r request) []byte {
		if before != nil {
			before(r.op)
		}
		body := appendSums(nil, crcs)
		if r.op == opBlock || r.op == opEqual {
			body = block(r.block)
		}
		answer := append(response{statusOK, r.block, uint32(len(body))}.append(nil), body...)
		return appendSums(answer, []uint32{checksum(body)})
	})
}

// answering is a source that sends the given answer to each request, on any number of connections.
func answering(t *testing.T, answer func(request) []byte) (address string) {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = lis.Close() })
	go func() {
		for {
			conn, err := lis.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = conn.Close() }()
				b := make([]byte, requestSize)
				_, err := io.ReadFull(conn, make([]byte, helloSize))
				for err == nil {
					if _, err = io.ReadFull(conn, b); err == nil {
						_, err = conn.Write(answer(parseRequest(b)))
					}
				}
			}()
		}
	}()
	return lis.Addr().String()
}

// A source that does not answer a request for its checksums may still send all blocks: that completes the
// transfer.
func TestAStalledRequestDoesNotDelayOthers(t *testing.T) {
	source, target := filled(newRand(t), 1<<20), empty(1<<20)
	asked, over := make(chan struct{}), make(chan struct{})
	var stalled atomic.Bool
	before := func(op uint32) {
		switch op {
		case opSums:
			if !stalled.Swap(true) {
				close(asked)
				<-over
			}
		case opBlock:
			<-asked
		}
	}
	t.Cleanup(func() { close(over) })
	const secret = "00112233445566778899aabbccddeeff"
	f := newFetch(t, target, Settings{BlockSize: small, Streams: 2, StallAfter: 5 * time.Minute})
	require.NoError(t, f.Add(honestUntilTheEnd(t, source, false, before), secret, Assigned))
	other := listen(t, time.Minute, 0)
	require.NoError(t, f.Add(address(other), other.Grant(offer(t, clone(source), small)).Secret(),
		Additional))
	status := wait(t, f)
	require.True(t, status.Done, status)
	requireSame(t, source, target)
}

// A source that is very slow is dropped when the streams of another one are idle.
func TestASlowSourceIsDropped(t *testing.T) {
	source, target := filled(newRand(t), 1<<20), empty(1<<20)
	fast, slow := listen(t, time.Minute, 0), listen(t, time.Minute, 0)
	grant := slow.Grant(offer(t, clone(source), 1<<16))
	// The fast source waits until the slow one sends a block.
	behind := forward(t, address(fast), func() int {
		for grant.Served() == 0 && t.Context().Err() == nil {
			time.Sleep(time.Millisecond)
		}
		return 1 << 16
	})
	trickle := forward(t, address(slow), func() int {
		time.Sleep(20 * time.Millisecond)
		return 5
	})
	f := newFetch(t, target, Settings{BlockSize: 1 << 16, Streams: 1})
	start := time.Now()
	require.NoError(t, f.Add(behind, fast.Grant(offer(t, source, 1<<16)).Secret(), Assigned))
	require.NoError(t, f.Add(trickle, grant.Secret(), Additional))
	status := wait(t, f)
	for !status.Done && status.Running {
		status = wait(t, f)
	}
	require.True(t, status.Done, status)
	require.GreaterOrEqual(t, time.Since(start), slowAfter)
	require.Less(t, time.Since(start), time.Minute) // the slow source takes four times as long for one block
	requireSame(t, source, target)
}

// forward forwards connections to a server. After the first kilobytes of answers on a connection, pause is
// called before each read and returns how much may be read.
func forward(t *testing.T, to string, pause func() (most int)) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "localhost:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", to)
			if err != nil {
				_ = client.Close()
				continue
			}
			go func() { _, _ = io.Copy(server, client); _ = server.Close() }()
			go func() {
				defer client.Close()
				defer server.Close()
				const freely = 1 << 12
				b := make([]byte, 1<<16)
				for passed, most := 0, freely; t.Context().Err() == nil; {
					if passed >= freely {
						most = pause()
					}
					n, err := server.Read(b[:most])
					if err != nil {
						return
					}
					if _, err := client.Write(b[:n]); err != nil {
						return
					}
					passed += n
				}
			}()
		}
	}()
	return l.Addr().String()
}
