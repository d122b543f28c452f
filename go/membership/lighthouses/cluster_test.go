package lighthouses_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// cluster has scripted lighthouses on the hosts a, b and c. One of them leads, as the test says: it answers
// each request with a quorum of the member alone.
type cluster struct {
	t   *testing.T
	net *fttest.Network

	mu     sync.Mutex
	leader string // its host, empty while there is none
	term   int64
	ids    int64
	log    []string // the hosts at which streams began, with the number of lighthouses that the member knows
	asked  []string // the hosts that were asked for a quorum
	left   int      // members that have announced that they leave
	resign bool     // a former leader ends its streams, and names the next one
}

type scripted struct {
	torchftpb.UnimplementedMemberServiceServer
	cluster *cluster
	host    string
}

func newCluster(t *testing.T, leader string) *cluster {
	c := &cluster{t: t, net: fttest.NewNetwork(), leader: leader, term: 1}
	for _, host := range []string{"a", "b", "c"} {
		t.Cleanup(c.net.Host(host).Serve(t, ":1", func(g *grpc.Server) {
			torchftpb.RegisterMemberServiceServer(g, scripted{cluster: c, host: host})
		}))
	}
	return c
}

// elect makes another lighthouse lead, in a later term.
func (c *cluster) elect(leader string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leader = leader
	c.term++
}

// visits returns the hosts at which streams began since the last call.
func (c *cluster) visits() (log []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	log, c.log = c.log, nil
	return log
}

func (s scripted) Attend(stream torchftpb.MemberService_AttendServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	c := s.cluster
	c.mu.Lock()
	leads, term, leader := c.leader == s.host, c.term, ""
	if c.leader != "" {
		leader = "http://" + c.leader + ":1"
	}
	c.log = append(c.log, fmt.Sprintf("%s of %d", s.host, first.GetGreeting().GetLighthouses()))
	c.mu.Unlock()
	if !leads {
		return wire.NotLeader(leader, "this lighthouse does not lead")
	}
	welcome := &torchftpb.Welcome{AliveIntervalUs: 333_333, Term: term, AnswersAlive: true}
	if err := stream.Send(&torchftpb.LighthouseMessage{
		Message: &torchftpb.LighthouseMessage_Welcome{Welcome: welcome},
	}); err != nil {
		return err
	}
	var member quorum.Member
	for {
		message, err := stream.Recv()
		if err != nil {
			return err
		}
		c.mu.Lock()
		resigned, leader := c.resign && c.leader != s.host, c.leader
		c.mu.Unlock()
		if resigned {
			return wire.NotLeader("http://"+leader+":1", "this lighthouse does not lead")
		}
		var answers []*torchftpb.LighthouseMessage
		switch m := message.GetMessage().(type) {
		case *torchftpb.MemberMessage_Alive:
			answers = append(answers, &torchftpb.LighthouseMessage{
				Message: &torchftpb.LighthouseMessage_Alive{Alive: true},
			})
		case *torchftpb.MemberMessage_Leaving:
			c.mu.Lock()
			c.left++
			c.mu.Unlock()
			answers = append(answers, &torchftpb.LighthouseMessage{
				Message: &torchftpb.LighthouseMessage_Released{Released: true},
			})
		case *torchftpb.MemberMessage_ShuttingDown:
			answers = append(answers, &torchftpb.LighthouseMessage{
				Message: &torchftpb.LighthouseMessage_Released{Released: true},
			})
		case *torchftpb.MemberMessage_Ask:
			if m.Ask.GetMember() != nil {
				member = wire.MemberFromProto(m.Ask.GetMember())
			}
			c.mu.Lock()
			c.ids++
			c.asked = append(c.asked, s.host)
			q := &quorum.Quorum{ID: term<<42 + c.ids, Members: []quorum.Member{member}}
			c.mu.Unlock()
			delivery, err := wire.WholeToProto(q, 1)
			if err != nil {
				return err
			}
			answers = append(answers, &torchftpb.LighthouseMessage{
				Number: m.Ask.GetNumber(), Message: &torchftpb.LighthouseMessage_Delivery{Delivery: delivery},
			})
		}
		for _, answer := range answers {
			if err := stream.Send(answer); err != nil {
				return err
			}
		}
	}
}

const (
	abc = "http://a:1,http://b:1,http://c:1"
	bca = "http://b:1,http://c:1,http://a:1"
)

// member is a member whose heartbeats and requests are repeated as a manager server repeats them.
type member struct {
	*lighthouses.Member
	t *testing.T
}

func (c *cluster) join(addresses string) *member { return c.joinOver(c.net.Host("m"), addresses) }

func (c *cluster) joinOver(network rpc.Network, addresses string) *member {
	c.t.Helper()
	joined, err := lighthouses.Join(c.t.Context(), addresses, "m", 10*time.Second,
		rpc.Dialing{Network: network})
	require.NoError(c.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			_ = joined.Attend(ctx, 100*time.Millisecond, func() {},
				func() quorum.Doing { return quorum.Doing{Phase: quorum.Training} })
			time.Sleep(250 * time.Millisecond)
		}
	}()
	c.t.Cleanup(func() {
		cancel()
		<-ended
		_ = joined.Close()
	})
	return &member{joined, c.t}
}

// quorum returns the id of the member's next quorum.
func (m *member) quorum() int64 {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), time.Minute)
	defer cancel()
	for {
		q, err := m.Quorum(ctx, quorum.Member{ReplicaID: "m", Address: "http://m:2"}, 0)
		if err == nil {
			return q.ID
		}
		require.Equal(m.t, codes.Unavailable, status.Code(err), err)
		time.Sleep(250 * time.Millisecond)
	}
}

func TestAMemberGoesToTheLeaderThatALighthouseNames(t *testing.T) {
	for addresses, want := range map[string][]string{
		abc:          {"a of 3", "c of 3"},
		bca:          {"b of 3", "c of 3"},
		"http://b:1": {"b of 1", "c of 1"}, // one name stands for all
	} {
		t.Run(addresses, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t, "c")
				m := c.join(addresses)
				start := time.Now()
				assert.EqualValues(t, 1, quorum.TermOf(m.quorum()))
				assert.Equal(t, want, c.visits())
				assert.Less(t, time.Since(start), 10*time.Millisecond)
				time.Sleep(20 * time.Second)
				assert.Empty(t, c.visits(), "it stays there")
			})
		})
	}
}

// The next leader is elected 0.8 s after the last one has failed, or later. A killed leader may cost 1.5 s,
// all others 3 s.
func TestHowLongAMemberIsWithoutALeader(t *testing.T) {
	const elected = 800 * time.Millisecond
	for name, test := range map[string]struct {
		away    func(c *cluster)
		elected time.Duration
		most    time.Duration
	}{
		"killed": {func(c *cluster) { c.net.Host("a").Kill() }, elected,
			1100 * time.Millisecond},
		// it still serves its streams: nothing is missing
		"deposed": {func(*cluster) {}, elected, 0},
		"stopped": {func(c *cluster) { c.net.Pause("a") }, elected,
			1600 * time.Millisecond},
		"vanished": {func(c *cluster) { c.net.Host("a").Vanish() }, elected,
			1600 * time.Millisecond},
		"cut off": {func(c *cluster) {
			c.net.Sever("a", "m")
			c.net.Sever("m",
				"a")
		}, elected, 1600 * time.Millisecond},
		"cut off in one direction": {func(c *cluster) { c.net.Sever("a", "m") }, elected,
			1600 * time.Millisecond},
		"stopped, and its connections reset": {func(c *cluster) { c.net.Pause("a"); c.net.Reset("a", "m") },
			1100 * time.Millisecond, 3 * time.Second},
	} {

		t.Run(name, func(t *testing.T) {
			const phases = 4
			for phase := range phases {
				synctest.Test(t, func(t *testing.T) {
					c := newCluster(t, "a")
					m := c.join(abc)
					before := m.quorum()
					time.Sleep(3*time.Second + time.Duration(phase)*time.Second/3/phases)
					test.away(c)
					c.mu.Lock()
					c.leader = ""
					c.mu.Unlock()
					time.AfterFunc(test.elected, func() { c.elect("c") })
					start := time.Now()
					after := m.quorum()
					assert.LessOrEqual(t, time.Since(start), test.most)
					assert.Greater(t, after, before)
				})
			}
		})
	}
}

// balanced is a network in which one name stands for all lighthouses: each connection to it goes to the
// present one.
type balanced struct {
	rpc.Network
	to *atomic.Value
}

func (b balanced) Dial(ctx context.Context, address string) (net.Conn, error) {
	if address == "name:1" {
		address = b.to.Load().(string)
	}
	return b.Network.Dial(ctx, address)
}

// The leader behind the only name of a list stops. The member connects again, and the name stands for another
// lighthouse by then.
func TestTheLeaderBehindANameIsLeftIfItStops(t *testing.T) {
	for _, next := range []string{"b:1", "c:1"} {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster(t, "a")
			var to atomic.Value
			to.Store("a:1")
			m := c.joinOver(balanced{c.net.Host("m"), &to}, "http://name:1")
			before := m.quorum()
			time.Sleep(3 * time.Second)
			c.net.Pause("a")
			time.AfterFunc(800*time.Millisecond, func() { c.elect("c"); to.Store(next) })
			start := time.Now()
			assert.Greater(t, m.quorum(), before)
			assert.Less(t, time.Since(start), 3*time.Second)
		})
	}
}

// A leader that was stopped does not know yet that another one leads. The members that have seen the next
// term do not stay with it.
func TestAMemberLeavesAFormerLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, "a")
		m := c.join(abc)
		c.elect("c") // term 2
		c.net.Host("a").Cut()
		later := m.quorum()
		require.EqualValues(t, 2, quorum.TermOf(later))

		c.visits()
		c.mu.Lock()
		c.leader, c.term, c.asked = "a", 1, nil
		c.mu.Unlock()
		c.net.Host("c").Cut()
		time.AfterFunc(5*time.Second, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.leader, c.term = "b", 3
		})
		start := time.Now()
		assert.EqualValues(t, 3, quorum.TermOf(m.quorum()))
		assert.GreaterOrEqual(t, time.Since(start), 5*time.Second)
		assert.Equal(t, []string{"c of 3", "a of 3"}, c.visits()[:2])
		c.mu.Lock()
		defer c.mu.Unlock()
		assert.Equal(t, []string{"b"}, c.asked, "the former leader was not asked")
	})
}

// A member finds the next leader even if it does not ask for a quorum: the lighthouse would count it as
// failed.
func TestAMemberReturnsInTheMiddleOfAStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, "a")
		c.join(abc).quorum()
		c.visits()
		c.elect("b")
		c.net.Host("a").Kill()
		time.Sleep(50 * time.Millisecond)
		assert.Equal(t, []string{"b of 3"}, c.visits())
		c.net.Host("b").Cut()
		time.Sleep(50 * time.Millisecond)
		assert.Equal(t, []string{"b of 3"}, c.visits(), "the one that served last is asked first")
	})
}

func TestAMemberGoesWhereAFormerLeaderSendsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, "a")
		c.mu.Lock()
		c.resign = true
		c.mu.Unlock()
		c.join(abc).quorum()
		c.visits()
		c.elect("c")
		time.Sleep(time.Second)
		assert.Equal(t, []string{"c of 3"}, c.visits())
	})
}

// dialing is a network that calls dialed before each dial.
type dialing struct {
	rpc.Network
	dialed func()
}

func (d dialing) Dial(ctx context.Context, address string) (net.Conn, error) {
	d.dialed()
	return d.Network.Dial(ctx, address)
}

// A scheduler starts the lighthouse again on another host, and writes its address into the file that all groups
// read.
func TestTheFileOfALighthouseIsReadAgain(t *testing.T) {
	for name, away := range map[string]func(c *cluster){
		"killed":   func(c *cluster) { c.net.Host("a").Kill() },
		"vanished": func(c *cluster) { c.net.Host("a").Vanish() },
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "lighthouse")
			moved := func(to string) { require.NoError(t, os.WriteFile(file, []byte(to+"\n"), 0o600)) }
			moved("http://a:1")
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t, "a")
				m := c.join(file)
				m.quorum()
				assert.Equal(t, []string{"a of 1"}, c.visits())
				away(c)
				c.elect("")
				time.Sleep(time.Minute)
				require.NoError(t, os.Remove(file)) // for a moment: the list stays
				time.Sleep(time.Minute)
				c.elect("b")
				moved("http://b:1")
				began := time.Now()
				m.quorum()
				assert.Less(t, time.Since(began), 15*time.Second)
				assert.Contains(t, c.visits(), "b of 1")

				// one that joins meets the former address first, or none
				for _, before := range []func(){func() { moved("http://a:1") }, func() { moved("") },
					func() { require.NoError(t, os.Remove(file)) }} {
					before()
					time.AfterFunc(20*time.Second, func() { moved("http://b:1") })
					joined, err := lighthouses.Dial(t.Context(), file, time.Minute,
						rpc.Dialing{Network: c.net.Host("n")})
					require.NoError(t, err)
					require.NoError(t, joined.Close())
				}
				removing := dialing{c.net.Host("n"), func() { _ = os.Remove(file) }}
				joined, err := lighthouses.Join(t.Context(), file, "late", time.Minute,
					rpc.Dialing{Network: removing})
				require.NoError(t, err)
				require.NoError(t, joined.Close())
			})
		})
	}
}

// A device on the way has forgotten a connection. Nothing arrives on it any more, and TCP notices that only
// after minutes.
func TestASilentConnectionIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, "a")
		m := c.join(abc)
		m.quorum()
		c.net.Hold("m", "a")
		start := time.Now()
		m.quorum()
		assert.Less(t, time.Since(start), 2*time.Second)

		c.net.Hold("m", "b") // it was asked meanwhile
		c.elect("b")
		c.net.Host("a").Kill()
		start = time.Now()
		m.quorum()
		assert.Less(t, time.Since(start), 2*time.Second)
	})
}

// Only heartbeats are answered. So a member sends them also while it sends something else all the time.
func TestAMemberThatSendsMuchStaysAtItsLighthouse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, "a")
		m := c.join(abc)
		m.quorum()
		c.visits()
		for range 100 {
			m.Report(&torchftpb.MemberMessage{
				Message: &torchftpb.MemberMessage_Healing{Healing: &torchftpb.HealProgress{Received: 1,
					Total: 2}},
			})
			time.Sleep(100 * time.Millisecond)
		}
		assert.Empty(t, c.visits())
	})
}

// A lighthouse must not send a member back to a quorum before its own, whose members have left it.
func TestAnEarlierQuorumIsNotUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, "a")
		m := c.join(abc)
		c.mu.Lock()
		c.ids = 10
		c.mu.Unlock()
		before := m.quorum()
		c.mu.Lock()
		c.ids = 3
		c.mu.Unlock()
		_, err := m.Quorum(t.Context(), quorum.Member{ReplicaID: "m", Address: "http://m:2"}, 0)
		assert.Equal(t, codes.Unavailable, status.Code(err))
		assert.ErrorContains(t, err, fmt.Sprintf("the lighthouse has sent quorum %d, and this member was "+
			"in quorum %d, which is later", before-7, before))
	})
}

// While a cluster has no leader, an error has what each lighthouse says.
func TestWithoutALeaderTheErrorNamesAllLighthouses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, "")
		c.net.Host("b").Kill()
		m := c.join(abc)
		c.visits()
		_, err := m.Quorum(t.Context(), quorum.Member{ReplicaID: "m"}, 0)
		assert.Equal(t, codes.Unavailable, status.Code(err))
		assert.ErrorContains(t, err,
			"attend call to lighthouse at http://a:1 failed: this lighthouse does not lead")
		assert.ErrorContains(t, err, "attend call to lighthouse at http://b:1 failed: ")
		assert.ErrorContains(t, err,
			"attend call to lighthouse at http://c:1 failed: this lighthouse does not lead")
	})
}

// The announcement that a group leaves is repeated at the next leader, if the first one has not answered it.
func TestALeaveIsAnnouncedToTheNextLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, "a")
		m := c.join(abc)
		m.quorum()
		c.net.Pause("a")
		time.AfterFunc(800*time.Millisecond, func() { c.elect("b") })
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		require.NoError(t, m.Leave(ctx))
		c.mu.Lock()
		defer c.mu.Unlock()
		assert.Equal(t, 1, c.left)
	})
}

// unary is an upstream lighthouse, which has no streams.
type unary struct {
	torchftpb.UnimplementedLighthouseServiceServer
	id int64 // of all of its quorums
}

func (u unary) Quorum(
	_ context.Context, req *torchftpb.LighthouseQuorumRequest,
) (*torchftpb.LighthouseQuorumResponse, error) {
	return &torchftpb.LighthouseQuorumResponse{Quorum: &torchftpb.Quorum{QuorumId: u.id,
		Participants: []*torchftpb.QuorumMember{req.GetRequester()}}}, nil
}

func (unary) Heartbeat(
	context.Context, *torchftpb.LighthouseHeartbeatRequest,
) (*torchftpb.LighthouseHeartbeatResponse, error) {
	return &torchftpb.LighthouseHeartbeatResponse{}, nil
}

// A job moves from a lighthouse of upstream to a cluster while it runs.
func TestAMemberOfAnUpstreamLighthouseMovesToACluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, "c")
		stop := c.net.Host("old").Serve(t, ":1",
			func(g *grpc.Server) { torchftpb.RegisterLighthouseServiceServer(g, unary{id: 1}) })
		m := c.join("http://old:1," + abc)
		assert.EqualValues(t, 1, m.quorum())
		assert.EqualValues(t, 1, m.quorum())
		assert.Empty(t, c.visits())
		stop()
		c.net.Host("old").Kill()
		assert.EqualValues(t, 1, quorum.TermOf(m.quorum()))
		time.Sleep(20 * time.Second)
		assert.Equal(t, []string{"a of 4", "c of 4"}, c.visits())
	})
}

// A member that received its quorum by a call has received no term, but the id of the quorum begins with one.
func TestAMemberKnowsTheTermOfAQuorumThatItGotByACall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, "c")
		const term = 5
		stop := c.net.Host("proxy").Serve(t, ":1", func(g *grpc.Server) {
			torchftpb.RegisterLighthouseServiceServer(g, unary{id: term<<42 + 1000})
		})
		m := c.join("http://proxy:1," + abc)
		before := m.quorum()
		require.EqualValues(t, term, quorum.TermOf(before))
		stop()
		c.net.Host("proxy").Kill()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		var err error
		for ctx.Err() == nil {
			_, err = m.Quorum(ctx, quorum.Member{ReplicaID: "m", Address: "http://m:2"}, 0)
			require.Equal(t, codes.Unavailable, status.Code(err))
			if strings.Contains(err.Error(), "has term") {
				break
			}
			time.Sleep(250 * time.Millisecond)
		}
		assert.ErrorContains(t, err,
			"the lighthouse has term 1, and this member has seen term 5: another lighthouse leads")
		c.mu.Lock()
		c.term = term
		c.mu.Unlock()
		c.elect("c")
		assert.Greater(t, m.quorum(), before)
	})
}
