package lighthouse_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// A panic of the machine ends the pending requests, and nothing else: the next quorum forms as usual,
// whichever event caused the panic.
func TestAPanicOfTheMachineEndsTheWaitsOnly(t *testing.T) {
	for name, cause := range map[string]func(t *testing.T, c *fttest.Cluster, x *rawStream){
		"a call": func(t *testing.T, c *fttest.Cluster, x *rawStream) {
			got := <-ask(dial(t, c, "y"), quorum.Member{ReplicaID: "y"}, time.Minute)
			assert.Equal(t, codes.Internal, status.Code(got.Err))
			assert.ErrorContains(t, got.Err, "internal error in the lighthouse")
		},
		"a heartbeat": func(t *testing.T, c *fttest.Cluster, x *rawStream) {
			assert.Equal(t, codes.Internal, status.Code(dial(t, c, "y").Heartbeat(t.Context(), "y")))
		},
		"an ask on a stream": func(t *testing.T, c *fttest.Cluster, x *rawStream) {
			x.ask(1, time.Minute)
			code, _ := x.failed()
			assert.Equal(t, codes.Internal, code)
		},
		"the beginning of a stream": func(t *testing.T, c *fttest.Cluster, x *rawStream) {
			before := c.Lighthouse.Streams()
			w := open(t, c, "y")
			w.send(&torchftpb.MemberMessage{
				Message: &torchftpb.MemberMessage_Greeting{Greeting: &torchftpb.Greeting{ReplicaId: "y"}},
			})
			for err := error(nil); err == nil; {
				_, err = w.stream.Recv() // the welcome may arrive before the error
				if err != nil {
					assert.Equal(t, codes.Internal, status.Code(err))
				}
			}
			synctest.Wait()
			assert.Equal(t, before, c.Lighthouse.Streams(), "the lighthouse has dropped the stream")
		},
		"the end of a stream": func(t *testing.T, c *fttest.Cluster, x *rawStream) {
			x.hangUp()
			synctest.Wait()
		},
		"a deadline on a stream": func(t *testing.T, c *fttest.Cluster, x *rawStream) {
			code, why := x.failed()
			assert.Equal(t, codes.DeadlineExceeded, code)
			assert.Contains(t, why, "internal error")
		},
		"a tick": func(*testing.T, *fttest.Cluster, *rawStream) { time.Sleep(time.Second) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := fttest.NewCluster(t, 4)
				called := ask(dial(t, c, "a"), quorum.Member{ReplicaID: "a"}, time.Hour)
				b := attend(t, c, "b")
				b.ask(1, time.Hour)
				x := attend(t, c, "x")
				if name == "a deadline on a stream" {
					x.ask(1, 10*time.Millisecond)
				}
				c.Lighthouse.BreakMachine()
				cause(t, c, x)

				got := <-called
				assert.Equal(t, codes.Internal, status.Code(got.Err))
				assert.ErrorContains(t, got.Err, "internal error in the lighthouse")
				code, _ := b.failed()
				assert.Equal(t, codes.Internal, code)
				assert.Positive(t, c.Log.Count("internal error"))

				// a and b ask again, and d and e for the first time.
				d := ask(dial(t, c, "d"), quorum.Member{ReplicaID: "d"}, time.Minute)
				e := ask(dial(t, c, "e"), quorum.Member{ReplicaID: "e"}, time.Minute)
				called = ask(dial(t, c, "a"), quorum.Member{ReplicaID: "a"}, time.Minute)
				synctest.Wait()
				// the new machine has not received the greeting of b's first stream, and has ended that
				// stream
				b = attend(t, c, "b")
				b.ask(1, time.Minute)
				for _, answer := range []<-chan result{d, e, called} {
					got := <-answer
					require.NoError(t, got.Err)
					assert.Len(t, got.Value.Members, 4)
				}
				b.answered()
			})
		})
	}
}

// A page only reads: a panic of its description ends no request, and the job's quorum and ids stay as they
// are.
func TestAPanicOfThePageCostsThePageOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := dial(t, c, "a")
		require.NoError(t, (<-ask(a, quorum.Member{ReplicaID: "a", Step: 7}, time.Minute)).Err)
		before := c.Lighthouse.Status()
		waits := ask(dial(t, c, "b"), quorum.Member{ReplicaID: "b"}, time.Minute)
		synctest.Wait()

		mend := c.Lighthouse.BreakMachine()
		code, body := get(t, browser(t, c, "far"), "/status")
		assert.Equal(t, 200, code)
		assert.Contains(t, body, "internal error in the status of a job")
		mend()

		assert.Equal(t, before.QuorumID, c.Lighthouse.Status().QuorumID)
		next := <-ask(a, quorum.Member{ReplicaID: "a", Step: 8}, time.Minute)
		require.NoError(t, next.Err)
		got := <-waits
		require.NoError(t, got.Err)
		assert.Equal(t, next.Value.ID, got.Value.ID)
	})
}

// A heartbeat of a name without a record is limited as a request to join is, and one that never asks does not
// count in a majority.
func TestHeartbeatsOfUnknownNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1, func(cfg *lighthouse.Config) { cfg.MaxJoinsPerSecond = 3 })
		client := dial(t, c, "a")
		require.NoError(t, (<-ask(client, quorum.Member{ReplicaID: "a"}, time.Minute)).Err)
		require.NoError(t, client.Heartbeat(t.Context(), "z0"))
		require.NoError(t, client.Heartbeat(t.Context(), "z1"))
		err := client.Heartbeat(t.Context(), "z2")
		assert.Equal(t, codes.Unavailable, status.Code(err))
		assert.ErrorContains(t, err, "max_joins_per_second")
		for range 10 {
			require.NoError(t, client.Heartbeat(t.Context(), "a"), "a member's heartbeats are no joins")
		}
		assert.Equal(t, 1, c.Lighthouse.Status().Healthy)
		time.Sleep(time.Second)
		require.NoError(t, (<-ask(client, quorum.Member{ReplicaID: "a", Step: 1}, time.Minute)).Err)
	})
}

// After a SIGTERM of the command, pending requests get UNAVAILABLE, so that managers ask again.
func TestAShutdownDoesNotWaitForClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 9)
		called := ask(dial(t, c, "a"), quorum.Member{ReplicaID: "a"}, time.Hour)
		b := attend(t, c, "b")
		b.ask(1, time.Hour)
		attend(t, c, "frozen")
		c.Net.Host("frozen").Freeze()
		start := time.Now()
		c.Lighthouse.Shutdown()
		assert.Less(t, time.Since(start), 3*time.Second)
		assert.Equal(t, codes.Unavailable, status.Code((<-called).Err))
		code, _ := b.failed()
		assert.Equal(t, codes.Unavailable, code)
	})
}

// The reason why a member is unreachable distinguishes the end of its process from a failure of its host or
// of the network.
func TestTheReasonDistinguishesARefusalFromNoAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		c.LighthouseOn("other", 1).Shutdown()
		assert.ErrorContains(t, c.Lighthouse.Connect("http://other:29510"),
			"its host answers, and refuses connections to its port")
		c.Net.Block("lighthouse", "other")
		assert.ErrorContains(t, c.Lighthouse.Connect("http://other:29510"), "no answer within 1s")
	})
}
