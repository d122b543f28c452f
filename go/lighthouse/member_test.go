package lighthouse_test

import (
	"context"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/clock"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// rawStream is a member's stream on which a test sends and receives single messages.
type rawStream struct {
	t      *testing.T
	id     string
	stream torchftpb.MemberService_AttendClient
	hangUp context.CancelFunc
	number uint64
	last   wire.Delivered
	listed bool // the last delivery had the list of the members
}

// attend opens a stream and sends a greeting.
func attend(t *testing.T, c *fttest.Cluster, id string) *rawStream {
	t.Helper()
	w := open(t, c, id)
	w.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Greeting{
		Greeting: &torchftpb.Greeting{ReplicaId: id},
	}})
	welcome := w.receive().GetWelcome()
	require.EqualValues(t, 1_666_666, welcome.GetAliveIntervalUs(), "a third of the heartbeat timeout")
	return w
}

func open(t *testing.T, c *fttest.Cluster, id string) *rawStream {
	t.Helper()
	return openAt(t, c, id, fttest.LighthouseAddr)
}

func openAt(t *testing.T, c *fttest.Cluster, id, address string) *rawStream {
	t.Helper()
	conn, err := rpc.Dial(t.Context(), rpc.Dialing{Network: c.Net.Host(id)}, "lighthouse", address,
		time.Second)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := torchftpb.NewMemberServiceClient(conn).Attend(ctx)
	require.NoError(t, err)
	t.Cleanup(func() {
		cancel()
		require.NoError(t, conn.Close())
	})
	return &rawStream{t: t, id: id, stream: stream, hangUp: cancel}
}

func (w *rawStream) send(m *torchftpb.MemberMessage) { require.NoError(w.t, w.stream.Send(m)) }

func (w *rawStream) receive() *torchftpb.LighthouseMessage {
	w.t.Helper()
	m, err := w.stream.Recv()
	require.NoError(w.t, err)
	return m
}

// ask requests the quorum of a step. Only the first request of a stream has the member.
func (w *rawStream) ask(step int64, timeout time.Duration) {
	ask := &torchftpb.Ask{Number: w.number + 1, TimeoutUs: timeout.Microseconds(), Step: step}
	if w.number == 0 {
		ask.Member = &torchftpb.QuorumMember{ReplicaId: w.id, Address: "http://" + w.id}
	}
	w.number++
	w.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Ask{Ask: ask}})
	synctest.Wait()
}

// answered receives the answer to the last request.
func (w *rawStream) answered() *quorum.Quorum {
	w.t.Helper()
	return w.delivered(w.receive())
}

func (w *rawStream) delivered(m *torchftpb.LighthouseMessage) *quorum.Quorum {
	w.t.Helper()
	require.NotNil(w.t, m.GetDelivery(), "%v", m)
	require.Equal(w.t, w.number, m.GetNumber(), "%v", m)
	require.NoError(w.t, w.last.Next(m.GetDelivery()))
	w.listed = m.GetDelivery().GetStates() == nil
	return w.last.Quorum
}

func (w *rawStream) failed() (codes.Code, string) {
	w.t.Helper()
	m := w.receive()
	require.Equal(w.t, w.number, m.GetNumber(), "%v", m)
	require.NotNil(w.t, m.GetFailure(), "%v", m)
	return codes.Code(m.GetFailure().GetCode()), m.GetFailure().GetMessage()
}

// A reason is sent to all members, and shown on the page. A member must not make the lighthouse send
// megabytes to each of thousands.
func TestAReasonIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a, b := attend(t, c, "a"), attend(t, c, "b")
		a.ask(1, time.Minute)
		b.ask(1, time.Minute)
		a.answered()
		b.answered()
		a.send(&torchftpb.MemberMessage{
			Message: &torchftpb.MemberMessage_Incomplete{Incomplete: "rank 1 " + strings.Repeat("ä", 1<<20)},
		})
		reason := b.receive().GetNotice().GetReason()
		assert.True(t, strings.HasPrefix(reason, "rank 1 ää"), reason[:min(len(reason), 100)])
		assert.Less(t, len(reason), 2048)
	})
}

func TestAListIsSentOnlyWhenItHasChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a, b := attend(t, c, "a"), attend(t, c, "b")
		for step := range int64(3) {
			a.ask(step, time.Minute)
			b.ask(step, time.Minute)
			for _, w := range []*rawStream{a, b} {
				q := w.answered()
				assert.Equal(t, step == 0, w.listed, "step %d", step)
				require.Len(t, q.Members, 2)
				assert.Equal(t, "http://a", q.Members[0].Address)
				assert.Equal(t, step, q.Members[1].Step)
			}
		}

		n := attend(t, c, "n")
		n.ask(0, time.Minute)
		a.ask(3, time.Minute)
		b.ask(3, time.Minute)
		for _, w := range []*rawStream{a, b, n} {
			q := w.answered()
			assert.True(t, w.listed, "a member has joined")
			require.Len(t, q.Members, 3)
			assert.EqualValues(t, 3, q.Members[0].Step)
			assert.EqualValues(t, 0, q.Members[2].Step)
		}

		n.hangUp()
		time.Sleep(6 * time.Second)
		a.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}})
		a.ask(4, time.Minute)
		b.ask(4, time.Minute)
		for _, w := range []*rawStream{a, b} {
			m := w.receive()
			for m.GetDelivery() == nil { // reports of the failure, and questions before it
				m = w.receive()
			}
			require.Len(t, w.delivered(m).Members, 2)
			assert.True(t, w.listed, "a member has left")
		}
	})
}

func TestANewStreamReceivesTheWholeQuorum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a, b := attend(t, c, "a"), attend(t, c, "b")
		a.ask(1, time.Minute)
		b.ask(1, time.Minute)
		a.answered()
		b.answered()
		b.hangUp()
		b = attend(t, c, "b")
		a.ask(2, time.Minute)
		b.number = 7 // above those of the earlier stream
		b.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Ask{Ask: &torchftpb.Ask{
			Number: b.number, TimeoutUs: time.Minute.Microseconds(), Step: 2,
			Member: &torchftpb.QuorumMember{ReplicaId: "b", Address: "http://b"},
		}}})
		require.Len(t, a.answered().Members, 2)
		assert.False(t, a.listed)
		require.Len(t, b.answered().Members, 2)
		assert.True(t, b.listed)
	})
}

// A member of a cluster leaves a lighthouse that is silent, so it is answered, and often, also if its list
// has one name for all lighthouses.
func TestHeartbeatsAreAnsweredInACluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fttest.NewAgreeing(t, 1)
		c := &l.Cluster
		for id, addresses := range map[string]uint32{"a": 3, "b": 1} {
			w := openAt(t, c, id, "http://"+l.Leader()+":29510")
			w.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Greeting{
				Greeting: &torchftpb.Greeting{ReplicaId: id, Lighthouses: addresses},
			}})
			welcome := w.receive().GetWelcome()
			require.True(t, welcome.GetAnswersAlive())
			require.EqualValues(t, 333_333, welcome.GetAliveIntervalUs())
			for range 3 {
				w.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}})
				assert.True(t, w.receive().GetAlive())
			}
		}
	})
}

func TestHeartbeatsAreNotAnsweredByTheOnlyLighthouse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		only := attend(t, c, "b")
		only.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}})
		only.ask(1, time.Minute)
		only.answered() // nothing was sent before the list
	})
}

// The lighthouses of a list that are in no cluster would each form quorums, so that a job could have several
// histories.
func TestAMemberThatKnowsSeveralLighthousesIsRefusedWithoutACluster(t *testing.T) {
	const want = "TORCHFT_LIGHTHOUSE names 3 lighthouses, and this one, http://lighthouse:29510, is in no " +
		"cluster: " +
		"start each of them with --cluster URL,URL,URL, or name one lighthouse"
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		w := open(t, c, "a")
		w.send(&torchftpb.MemberMessage{
			Message: &torchftpb.MemberMessage_Greeting{Greeting: &torchftpb.Greeting{ReplicaId: "a",
				Lighthouses: 3}},
		})
		_, err := w.stream.Recv()
		assert.Equal(t, codes.FailedPrecondition, status.Code(err))
		assert.ErrorContains(t, err, want)

		conn, err := rpc.Dial(t.Context(), rpc.Dialing{Network: c.Net.Host("a")}, "lighthouse",
			fttest.LighthouseAddr, time.Second)
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close()) }()
		_, err = torchftpb.NewLighthouseServiceClient(conn).Quorum(t.Context(),
			&torchftpb.LighthouseQuorumRequest{
				Requester: &torchftpb.QuorumMember{ReplicaId: "a"}, Lighthouses: 3,
			})
		assert.Equal(t, codes.FailedPrecondition, status.Code(err))
		assert.ErrorContains(t, err, want)
		assert.Empty(t, c.Lighthouse.Status().Members)
	})
}

// A leader that was deposed, and does not know it yet, refuses a member that a later leader has served: the
// member asks the others.
func TestAMemberThatALaterLeaderServedIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		w := open(t, c, "a")
		w.send(&torchftpb.MemberMessage{
			Message: &torchftpb.MemberMessage_Greeting{Greeting: &torchftpb.Greeting{ReplicaId: "a",
				Term: 3}},
		})
		_, err := w.stream.Recv()
		require.Equal(t, codes.Unavailable, status.Code(err))
		assert.Contains(t, err.Error(),
			"member a was served in term 3: this lighthouse, of term 0, does not lead any more")
		assert.Zero(t, c.Lighthouse.Status().Healthy, "a refused greeting is no sign of life")
	})
}

func TestARequestOnAStreamHasADeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a := attend(t, c, "a")
		for step := range int64(3) { // one timer serves all requests of a stream
			start := time.Now()
			a.ask(step, time.Second)
			code, text := a.failed()
			assert.Equal(t, codes.DeadlineExceeded, code)
			assert.Contains(t, text, "no quorum in time: 1 member asked, min_replicas is 2")
			assert.Less(t, time.Since(start), time.Second)
			assert.Greater(t, time.Since(start), 900*time.Millisecond)
			assert.Zero(t, c.Lighthouse.Status().Waiters)
		}
		b := attend(t, c, "b")
		a.ask(3, time.Minute)
		b.ask(3, time.Minute)
		a.answered()
		b.answered()
		time.Sleep(2 * time.Minute) // longer than the timeout of the request that was answered
		a.ask(4, 10*time.Second)
		synctest.Wait()
		assert.Equal(t, 1, c.Lighthouse.Status().Waiters)
	})
}

func TestAMemberWithdrawsItsRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a := attend(t, c, "a")
		a.ask(1, time.Minute)
		a.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Withdraw{Withdraw: 17}})
		synctest.Wait()
		assert.Equal(t, 1, c.Lighthouse.Status().Waiters, "the withdrawn number is not that of a's request")
		a.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Withdraw{Withdraw: a.number}})
		synctest.Wait()
		assert.Zero(t, c.Lighthouse.Status().Waiters)

		a.ask(1, time.Minute)
		a.ask(2, time.Minute) // replaces the previous request
		assert.Equal(t, 1, c.Lighthouse.Status().Waiters)
		a.hangUp()
		synctest.Wait()
		assert.Zero(t, c.Lighthouse.Status().Waiters, "the stream of a broke")
	})
}

func TestAShutdownIsAnnouncedOnEveryStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		waits, idle := attend(t, c, "a"), attend(t, c, "b")
		waits.ask(1, time.Minute)
		start := time.Now()
		done := fttest.Start(func() (any, error) {
			c.Lighthouse.Shutdown()
			return nil, nil
		})
		code, text := waits.failed()
		assert.Equal(t, codes.Unavailable, code)
		assert.Contains(t, text, "shutting down")
		for _, w := range []*rawStream{waits, idle} {
			assert.True(t, w.receive().GetClosing())
			w.hangUp()
		}
		<-done
		assert.Less(t, time.Since(start), time.Second, "no stream had to be cut off")
	})
}

func TestSilenceOnAStreamIsAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := attend(t, c, "a")
		for range 5 {
			time.Sleep(4 * time.Second)
			a.send(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}})
			synctest.Wait()
			assert.Equal(t, 1, c.Lighthouse.Status().Healthy)
		}
		time.Sleep(6 * time.Second)
		assert.Zero(t, c.Lighthouse.Status().Healthy)
	})
}

// A lighthouse could not hear its members while its own host was suspended.
func TestALighthouseThatWasSuspendedCountsNobodyAsFailed(t *testing.T) {
	for suspended, noticed := range map[time.Duration]int{0: 0, time.Second: 0, 5 * time.Second: 1,
		time.Hour: 1} {
		t.Run(suspended.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				host := clock.Fake()
				c := fttest.NewCluster(t, 1)
				attend(t, c, "a")
				time.Sleep(4 * time.Second)
				host.Add(int64(suspended))
				// in which messages arrive that were sent before or during the suspend
				time.Sleep(900 * time.Millisecond)
				assert.Equal(t, 1, c.Lighthouse.Status().Healthy)
				assert.Equal(t, noticed, c.Log.Count("the lighthouse was stopped for some time"))
				time.Sleep(300 * time.Millisecond) // with a tick, which finds the silence
				assert.Zero(t, c.Lighthouse.Status().Healthy, "silence while the lighthouse was awake counts")
			})
		})
	}
}

func TestAStreamRefusesInvalidMessages(t *testing.T) {
	greeting := func(id string) *torchftpb.MemberMessage {
		return &torchftpb.MemberMessage{
			Message: &torchftpb.MemberMessage_Greeting{Greeting: &torchftpb.Greeting{ReplicaId: id}},
		}
	}
	ask := func(a *torchftpb.Ask) *torchftpb.MemberMessage {
		return &torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Ask{Ask: a}}
	}
	for name, test := range map[string]struct {
		messages []*torchftpb.MemberMessage
		want     string
	}{
		"no greeting": {[]*torchftpb.MemberMessage{ask(&torchftpb.Ask{})}, "no greeting"},
		"no name":     {[]*torchftpb.MemberMessage{greeting("")}, "replica_id"},
		"a long name": {[]*torchftpb.MemberMessage{greeting(strings.Repeat("x", 1025))},
			"replica_id has 1025 bytes: allowed are 1024"},
		"two greetings": {[]*torchftpb.MemberMessage{greeting("a"), greeting("a")}, "one greeting"},
		"no member": {[]*torchftpb.MemberMessage{greeting("a"), ask(&torchftpb.Ask{TimeoutUs: 1})},
			"the first request of a stream has no member"},
		"no deadline": {[]*torchftpb.MemberMessage{greeting("a"),
			ask(&torchftpb.Ask{Member: &torchftpb.QuorumMember{ReplicaId: "a"}})}, "timeout_us is 0"},
		"another's name": {[]*torchftpb.MemberMessage{greeting("a"),
			ask(&torchftpb.Ask{TimeoutUs: 1, Member: &torchftpb.QuorumMember{ReplicaId: "b"}})},
			`replica_id is "b"`},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := open(t, fttest.NewCluster(t, 1), "a")
				for _, m := range test.messages {
					w.send(m)
				}
				for {
					_, err := w.stream.Recv()
					if err == nil {
						continue // the welcome
					}
					assert.Equal(t, codes.InvalidArgument, status.Code(err))
					assert.ErrorContains(t, err, test.want)
					return
				}
			})
		})
	}
}

func (w *rawStream) tell(m *torchftpb.MemberMessage) {
	w.send(m)
	synctest.Wait()
}

func (w *rawStream) stopped(quorumID, step int64) {
	w.tell(&torchftpb.MemberMessage{
		Message: &torchftpb.MemberMessage_Stopped{Stopped: &torchftpb.Step{QuorumId: quorumID, Step: step}},
	})
}

func (w *rawStream) alive(step int64) {
	w.tell(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Alive{Alive: true}, Step: step})
}

// A member answers a call with a step that cannot be, or not at all: it is evicted after the heartbeat
// timeout, although its heartbeats arrive, and the other one goes on.
func TestBadAnswersToACall(t *testing.T) {
	for name, bad := range map[string]func(w *rawStream, quorumID int64){
		"none": func(*rawStream, int64) {},
		"a step below 0": func(w *rawStream,
			id int64) {
			w.stopped(id, math.MinInt64)
			w.stopped(id, -1)
		},
		"no step": func(w *rawStream, id int64) { w.stopped(id, 0) },
		"a huge step": func(w *rawStream,
			id int64) {
			w.alive(math.MaxInt64)
			w.stopped(id, math.MaxInt64)
		},
		"an earlier quorum":  func(w *rawStream, id int64) { w.stopped(id-1, 3) },
		"a later quorum":     func(w *rawStream, id int64) { w.stopped(id+1, 3) },
		"a step it has left": nil,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := fttest.NewCluster(t, 1)
				a, b := attend(t, c, "a"), attend(t, c, "b")
				for _, w := range []*rawStream{a, b} {
					w.number = 1
					w.tell(&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Ask{Ask: &torchftpb.Ask{
						Number: 1, TimeoutUs: time.Minute.Microseconds(), Step: 1, CommittedQuorumId: 7,
						Member: &torchftpb.QuorumMember{ReplicaId: w.id, Address: "http://" + w.id},
					}}})
				}
				q := a.answered()
				require.True(t, q.Stands)
				require.Equal(t, q.ID, b.answered().ID)
				b.tell(&torchftpb.MemberMessage{
					Message: &torchftpb.MemberMessage_Changes{Changes: "another setting"},
				})
				require.Equal(t, q.ID, called(a))
				require.Equal(t, q.ID, called(b))
				if bad == nil {
					a.alive(6)
					a.stopped(q.ID, 3)
					b.stopped(q.ID, 6)
					assert.EqualValues(t, 7, roundOf(b))
					assert.EqualValues(t, 7, roundOf(a))
					return
				}
				bad(a, q.ID)
				b.stopped(q.ID, 3)
				for range 6 {
					time.Sleep(time.Second)
					a.alive(0)
					b.alive(2)
				}
				next := func() *torchftpb.LighthouseMessage {
					m := b.receive()
					for m.GetNotice().GetKind() == torchftpb.Notice_PROGRESS_ASKED {
						m = b.receive()
					}
					return m
				}
				failed := next().GetNotice()
				assert.Equal(t, "a", failed.GetReplicaId())
				assert.Contains(t, failed.GetReason(), "it has not answered the call of the next quorum")
				b.ask(3, time.Minute)
				assert.Len(t, b.delivered(next()).Members, 1)
			})
		})
	}
}

// called returns the quorum after which the next one is called, 0 if the message is another one.
func called(w *rawStream) int64 {
	if n := w.receive().GetNotice(); n.GetKind() == torchftpb.Notice_CALLED {
		return n.GetQuorumId()
	}
	return 0
}

// roundOf returns the step of the round, 0 if the message is another one.
func roundOf(w *rawStream) int64 {
	if n := w.receive().GetNotice(); n.GetKind() == torchftpb.Notice_ROUND_KNOWN {
		return n.GetStep()
	}
	return 0
}
