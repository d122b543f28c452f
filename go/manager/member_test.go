package manager_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// upstreamLighthouse serves the calls of an upstream lighthouse: quorums and heartbeats. Each quorum has one
// group.
type upstreamLighthouse struct {
	torchftpb.UnimplementedLighthouseServiceServer
	quorums, beats atomic.Int64
}

func (s *upstreamLighthouse) Quorum(
	_ context.Context, req *torchftpb.LighthouseQuorumRequest,
) (*torchftpb.LighthouseQuorumResponse, error) {
	return &torchftpb.LighthouseQuorumResponse{Quorum: &torchftpb.Quorum{
		QuorumId: s.quorums.Add(1), Participants: []*torchftpb.QuorumMember{req.GetRequester()},
	}}, nil
}

func (s *upstreamLighthouse) Heartbeat(
	context.Context, *torchftpb.LighthouseHeartbeatRequest,
) (*torchftpb.LighthouseHeartbeatResponse, error) {
	s.beats.Add(1)
	return &torchftpb.LighthouseHeartbeatResponse{}, nil
}

// serve starts a gRPC server at the address of the cluster's lighthouse.
func serve(t *testing.T, c *fttest.Cluster, register func(*grpc.Server)) (stop func()) {
	t.Helper()
	c.Net.Host("lighthouse").Kill()
	c.Lighthouse.Shutdown()
	return serveOn(t, c, "lighthouse", register)
}

func serveOn(t *testing.T, c *fttest.Cluster, host string, register func(*grpc.Server)) (stop func()) {
	t.Helper()
	return c.Net.Host(host).Serve(t, host+":29510", register)
}

func TestALighthouseWithoutStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		upstream := &upstreamLighthouse{}
		stop := serve(t, c, func(g *grpc.Server) { torchftpb.RegisterLighthouseServiceServer(g, upstream) })
		g := c.StartGroup("a", 2)
		for step := range int64(3) {
			assert.Equal(t, step+1, round(t, step, g)[0].GetQuorumId())
		}
		time.Sleep(10 * time.Second)
		assert.InDelta(t, 100, upstream.beats.Load(), 3,
			"the group sends one heartbeat per heartbeat_interval")

		// The upstream lighthouse is replaced by one with streams while the job runs.
		stop()
		c.StartLighthouse(1)
		for step := int64(3); step < 6; step++ {
			round(t, step, g)
			time.Sleep(2 * time.Second)
		}
		assert.EqualValues(t, 3, upstream.quorums.Load())
		assert.Equal(t, 1, c.Lighthouse.Status().Healthy)
	})
}

// The lighthouse is replaced by an upstream one, and the group makes calls from then on.
func TestAGroupCommitsAfterAChangeFromAStreamToCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 1)
		round(t, 0, g)
		stop := serve(t, c, func(g *grpc.Server) {
			torchftpb.RegisterLighthouseServiceServer(g,
				&upstreamLighthouse{})
		})
		defer stop()
		for step := range int64(3) {
			round(t, 1+step, g)
			time.Sleep(10 * time.Second)
			vote := <-g.Vote(0, 1+step, true, time.Second)
			require.NoError(t, vote.Err)
			assert.True(t, vote.Value)
		}
	})
}

func TestAGroupOpensAnotherStreamWhenItsConnectionBreaks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		for step := range int64(5) {
			for i, r := range round(t, step, a, b) {
				assert.Equal(t, []string{"a", "b"}, r.GetReplicaIds())
				assert.EqualValues(t, i, r.ReplicaRank)
				assert.Equal(t, step, r.MaxStep)
			}
			a.Host(-1).Cut()
			b.Host(-1).Cut()
			time.Sleep(3 * time.Second) // the ranks reconnect, too
			assert.Equal(t, 2, c.Lighthouse.Status().Healthy)
		}
	})
}

func TestAConnectionThatBreaksInMidRound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		round(t, 1, a, b)
		asked := a.Quorum(0, 2, time.Minute)
		synctest.Wait()
		c.Net.Host("lighthouse").Cut()
		synctest.Wait()
		other := b.Quorum(0, 2, time.Minute)
		got := <-asked
		require.NoError(t, got.Err)
		assert.Equal(t, []string{"a", "b"}, got.Value.GetReplicaIds())
		assert.Less(t, got.Took, 3*time.Second)
		require.NoError(t, (<-other).Err)
	})
}

// wrongAtFirst is a lighthouse that answers the first request with a wrong delivery.
type wrongAtFirst struct {
	torchftpb.UnimplementedMemberServiceServer
	streams, asks atomic.Int64
	wrong         *torchftpb.Delivery
}

func (f *wrongAtFirst) Attend(stream torchftpb.MemberService_AttendServer) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if m.GetGreeting() != nil {
			f.streams.Add(1)
			_ = stream.Send(&torchftpb.LighthouseMessage{
				Message: &torchftpb.LighthouseMessage_Welcome{
					Welcome: &torchftpb.Welcome{AliveIntervalUs: 1e6},
				},
			})
		}
		ask := m.GetAsk()
		if ask == nil {
			continue
		}
		delivery, err := wire.WholeToProto(&quorum.Quorum{ID: 9,
			Members: []quorum.Member{{ReplicaID: "a", Step: ask.GetStep()}}}, 1)
		if err != nil {
			return err
		}
		if f.asks.Add(1) == 1 {
			delivery = f.wrong
		}
		_ = stream.Send(&torchftpb.LighthouseMessage{Number: ask.GetNumber(),
			Message: &torchftpb.LighthouseMessage_Delivery{Delivery: delivery}})
	}
}

func TestAQuorumThatCannotBeReadIsRequestedAgain(t *testing.T) {
	for name, wrong := range map[string]*torchftpb.Delivery{
		"nothing":                 {},
		"invalid compressed data": {Form: &torchftpb.Delivery_Packed{Packed: []byte("\xff\xff nonsense")}},
		"a list that was not sent": {List: 1, Form: &torchftpb.Delivery_States{
			States: &torchftpb.QuorumStates{QuorumId: 8},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := fttest.NewCluster(t, 1)
				f := &wrongAtFirst{wrong: wrong}
				defer serve(t, c, func(g *grpc.Server) { torchftpb.RegisterMemberServiceServer(g, f) })()
				g := c.StartGroup("a", 1)
				got := <-g.Quorum(0, 5, time.Minute)
				require.NoError(t, got.Err)
				assert.EqualValues(t, 9, got.Value.GetQuorumId())
				assert.EqualValues(t, 5, got.Value.MaxStep)
				assert.EqualValues(t, 2, f.streams.Load())
				g.Server.Shutdown()
			})
		})
	}
}

// upstream is a group of the published package: it calls the lighthouse for each step, and sends heartbeats
// by calls.
type upstream struct {
	t      *testing.T
	client torchftpb.LighthouseServiceClient
	step   int64
}

func startUpstream(t *testing.T, c *fttest.Cluster) *upstream {
	t.Helper()
	conn, err := rpc.Dial(t.Context(), rpc.Dialing{Network: c.Net.Host("u")}, "lighthouse",
		fttest.LighthouseAddr, time.Second)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	return &upstream{t: t, client: torchftpb.NewLighthouseServiceClient(conn)}
}

// asks requests a quorum. When follow has received it, the group has the weights of that step, and trains in
// it.
func (u *upstream) asks() (follow func() (members int)) {
	_, err := u.client.Heartbeat(u.t.Context(), &torchftpb.LighthouseHeartbeatRequest{ReplicaId: "u"})
	require.NoError(u.t, err)
	answered := fttest.Start(func() (*torchftpb.LighthouseQuorumResponse, error) {
		ctx, cancel := context.WithTimeout(u.t.Context(), time.Minute)
		defer cancel()
		return u.client.Quorum(ctx, &torchftpb.LighthouseQuorumRequest{Requester: &torchftpb.QuorumMember{
			ReplicaId: "u", Address: "http://u:1", StoreAddress: "u:1", Step: u.step, WorldSize: 1,
		}})
	})
	synctest.Wait()
	return func() int {
		got := <-answered
		require.NoError(u.t, got.Err)
		members := got.Value.GetQuorum().GetParticipants()
		for _, m := range members {
			u.step = max(u.step, m.GetStep())
		}
		u.step++
		return len(members)
	}
}

// An upstream group joins two groups that train on without requests, trains with them, and ends between two
// steps. No step is lost, and in the end the two train on while their lighthouse is stopped.
func TestAnUpstreamGroupJoinsAQuorumThatStandsAndLeavesIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := &trainer{Group: c.StartGroup("a", 1), step: 1, committed: -1}
		b := &trainer{Group: c.StartGroup("b", 1), step: 1, committed: -1}
		trains := func() {
			require.Empty(t, ask(t, a, b))
			a.vote(t, true)
			b.vote(t, true)
			synctest.Wait()
		}
		away := func() { // so these steps need no request
			c.Net.Pause("lighthouse")
			for range 3 {
				trains()
			}
			c.Net.Resume("lighthouse")
			time.Sleep(time.Second)
		}
		trains()
		away()

		first, u := a.quorum, startUpstream(t, c)
		joined, steps := u.asks(), 0
		for ; a.quorum == first; steps++ {
			trains()
		}
		assert.LessOrEqual(t, steps, 2, "it joins within two steps")
		require.Equal(t, 3, joined())
		for range 3 {
			pending := asks(a, b)
			joined := u.asks()
			require.Empty(t, follow(t, pending, a, b))
			require.Equal(t, 3, joined())
			a.vote(t, true)
			b.vote(t, true)
		}
		began := time.Now()
		trains() // once the heartbeat of the other one is too old
		assert.InDelta(t, 5, time.Since(began).Seconds(), 1)
		trains()
		away()
		assert.Equal(t, a.step, b.step)
	})
}

// caller is a lighthouse with quorums that stand. A test sends its messages.
type caller struct {
	torchftpb.UnimplementedMemberServiceServer
	asks, streams atomic.Int64
	ids           []int64 // of the quorums with which it answers; the last one repeats
	stream        atomic.Pointer[torchftpb.MemberService_AttendServer]
	stopped       chan *torchftpb.Step
}

func (f *caller) Attend(stream torchftpb.MemberService_AttendServer) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		switch m := m.GetMessage().(type) {
		case *torchftpb.MemberMessage_Greeting:
			f.streams.Add(1)
			f.stream.Store(&stream)
			_ = stream.Send(&torchftpb.LighthouseMessage{
				Message: &torchftpb.LighthouseMessage_Welcome{
					Welcome: &torchftpb.Welcome{AliveIntervalUs: 1e6},
				},
			})
		case *torchftpb.MemberMessage_Stopped:
			f.stopped <- m.Stopped
		case *torchftpb.MemberMessage_Ask:
			id := f.ids[min(int(f.asks.Add(1)), len(f.ids))-1]
			delivery, err := wire.WholeToProto(&quorum.Quorum{ID: id, Stands: true, Members: []quorum.Member{{
				ReplicaID: "a", Step: m.Ask.GetStep(), CommittedQuorumID: m.Ask.GetCommittedQuorumId(),
			}}}, 1)
			if err != nil {
				return err
			}
			_ = stream.Send(&torchftpb.LighthouseMessage{Number: m.Ask.GetNumber(),
				Message: &torchftpb.LighthouseMessage_Delivery{Delivery: delivery}})
		}
	}
}

func (f *caller) calls(quorumIDs ...int64) {
	for _, id := range quorumIDs {
		f.notify(&torchftpb.Notice{Kind: torchftpb.Notice_CALLED, QuorumId: id})
	}
	synctest.Wait()
}

func (f *caller) names(quorumID int64, steps ...int64) {
	for _, step := range steps {
		f.notify(&torchftpb.Notice{Kind: torchftpb.Notice_ROUND_KNOWN, QuorumId: quorumID, Step: step})
	}
	synctest.Wait()
}

func (f *caller) notify(n *torchftpb.Notice) {
	_ = (*f.stream.Load()).Send(&torchftpb.LighthouseMessage{
		Message: &torchftpb.LighthouseMessage_Notice{Notice: n},
	})
}

// The group answers each call of its quorum, and no other one. A round of another quorum, one that was not
// called for, and one below a step that was begun change nothing.
func TestCallsAndRoundsThatAreWrong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		f := &caller{ids: []int64{9, 8, 9}, stopped: make(chan *torchftpb.Step, 10)}
		defer serve(t, c, func(g *grpc.Server) { torchftpb.RegisterMemberServiceServer(g, f) })()
		g := &trainer{Group: c.StartGroup("a", 1), step: 1, committed: 5}
		ask(t, g)
		g.vote(t, true)
		stops := func() (steps []int64) {
			for len(f.stopped) > 0 {
				s := <-f.stopped
				require.EqualValues(t, 9, s.GetQuorumId())
				steps = append(steps, s.GetStep())
			}
			return steps
		}
		f.names(9, 2)             // not called for
		f.calls(8, 10, -1, 1<<62) // of other quorums
		f.names(8, 2)             // of another quorum
		assert.Empty(t, stops())  //
		f.calls(9, 9)             // twice
		f.names(9, -1<<63, -1, 0) // below 0
		f.calls(9)                //
		assert.Equal(t, []int64{3, 3, 3}, stops())
		f.names(9, 2) // below the step that was begun
		f.names(9, 4)
		ask(t, g)
		g.vote(t, true)
		ask(t, g)
		g.vote(t, true)
		f.calls(9)
		assert.Equal(t, []int64{4}, stops())
		assert.EqualValues(t, 1, f.asks.Load(), "the quorum stands until step 4")
		ask(t, g) // the first answer is an earlier quorum: the group opens another stream
		assert.EqualValues(t, 9, g.quorum)
		assert.EqualValues(t, 3, f.asks.Load())
		assert.EqualValues(t, 2, f.streams.Load())
		g.Server.Shutdown()
	})
}

// After a restart of the lighthouse all groups reconnect at once, not only those that ask for a quorum.
func TestGroupsReconnectSoonAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		var groups []*fttest.Group
		for _, name := range []string{"a", "b", "c", "d"} {
			groups = append(groups, c.StartGroup(name, 1))
		}
		before := round(t, 1, groups...)
		time.Sleep(10 * time.Second) // a long step
		c.Net.Host("lighthouse").Kill()
		c.Lighthouse.Shutdown()
		time.Sleep(30 * time.Second)
		c.StartLighthouse(1)
		time.Sleep(2 * time.Second)
		assert.Equal(t, 4, c.Lighthouse.Status().Healthy)
		after := round(t, 2, groups...)
		assert.Equal(t, before[0].GetQuorumId(), after[0].GetQuorumId())
		assert.Len(t, after[0].GetReplicaIds(), 4)
	})
}

func TestAnIdleGroupSendsHeartbeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("a", 1)
		round(t, 1, g)
		idle := 10 * time.Minute
		if testmain.Full() {
			idle = time.Hour
		}
		time.Sleep(idle)
		synctest.Wait()
		status := c.Lighthouse.Status()
		require.Equal(t, 1, status.Healthy)
		assert.Less(t, status.Members[0].HeartbeatAgeMS, int64(1667))
	})
}
