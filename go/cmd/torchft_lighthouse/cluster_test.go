package main

import (
	"bytes"
	"context"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/torchftpb"
)

// local starts a cluster and a job on this host.
func local(t *testing.T) *cluster { return start(t, free(t), t.TempDir(), "127.0.0.1", nil) }

func TestAKilledLeaderCostsNoStep(t *testing.T) {
	c := local(t)
	c.settled()
	since := c.attempts()
	leader, _ := c.leader()
	leader.end(syscall.SIGKILL)
	t.Logf("the next steps took %s", c.steps(3))
	leader.start()
	c.settled()
	c.steps(3)
	c.noStepIsLost(since)
	c.check()
}

// The lighthouse is stopped, or killed and not restarted, for longer than the heartbeat timeout. The groups
// train on, and lose no step.
func TestAJobTrainsOnWhileItsLighthouseIsAway(t *testing.T) {
	c := start(t, free(t)[:1], t.TempDir(), "127.0.0.1", nil)
	since, one := c.attempts(), c.all[0]
	for _, away := range []struct {
		leave, comeBack func()
		full            time.Duration
	}{
		{func() { one.signal(syscall.SIGSTOP) }, func() { one.signal(syscall.SIGCONT) }, time.Minute},
		{func() { one.end(syscall.SIGKILL) }, one.start, 30 * time.Second},
	} {
		away.leave()
		c.stepsFor(away.full)
		away.comeBack()
		c.until("the lighthouse knows the job", func() bool { return c.healthy(one) == len(c.groups) })
		c.steps(3)
	}
	c.noStepIsLost(since)
	c.restartGroup(0) // a change of members needs the lighthouse, which still leads the same job
	c.steps(3)
	c.check()
}

func TestAJobTrainsOnWhileLighthousesOfItsClusterAreStopped(t *testing.T) {
	testmain.Slow(t)
	c := local(t)
	c.settled()
	since := c.attempts()
	leader, _ := c.leader()
	for _, stopped := range [][]*process{{leader}, c.all} {
		for _, l := range stopped {
			l.signal(syscall.SIGSTOP)
		}
		c.stepsFor(time.Minute)
		for _, l := range stopped {
			l.signal(syscall.SIGCONT)
		}
		c.settled()
		c.steps(3)
	}
	c.noStepIsLost(since)
	c.check()
}

// stepsFor makes steps for the time full with FULL, which is longer than a keepalive of gRPC, and else for
// six seconds.
func (c *cluster) stepsFor(full time.Duration) {
	c.t.Helper()
	if !testmain.Full() {
		full = 6 * time.Second
	}
	for began := time.Now(); time.Since(began) < full; {
		c.steps(3)
	}
}

// The leader is stopped until another one leads. When it goes on, the groups' messages and those of the other
// lighthouses are there.
func TestAStoppedLeaderThatGoesOnAnswersNobody(t *testing.T) {
	testmain.Slow(t)
	c := local(t)
	c.settled()
	since := c.attempts()
	for range 2 {
		leader, _ := c.leader()
		leader.signal(syscall.SIGSTOP)
		t.Logf("the next steps took %s", c.steps(3))
		leader.signal(syscall.SIGCONT)
		c.settled()
		c.steps(3)
	}
	c.noStepIsLost(since)
	c.check()
}

func TestAJobGoesOnAfterAllLighthousesWereKilled(t *testing.T) {
	c := local(t)
	c.settled()
	since := c.attempts()
	for _, l := range c.all {
		l.end(syscall.SIGKILL)
	}
	for _, l := range c.all {
		l.start()
	}
	t.Logf("the next steps took %s", c.steps(3))
	c.settled()
	c.noStepIsLost(since)
	c.check()
}

func TestAJobWaitsForTheMajority(t *testing.T) {
	testmain.Slow(t)
	c := local(t)
	c.settled()
	since := c.attempts()
	_, followers := c.leader()
	for _, l := range followers {
		l.end(syscall.SIGKILL)
	}
	time.Sleep(2 * time.Second)
	c.steps(20) // the quorum stands
	c.noStepIsLost(since)
	c.restartGroup(0)
	c.until("the groups wait", func() bool {
		before := c.attempts()
		time.Sleep(2 * time.Second)
		return c.attempts() == before
	})
	assert.Contains(t, c.log.String(), "no lighthouse of the cluster leads")
	followers[0].start()
	t.Logf("the next steps took %s", c.steps(3))
	followers[1].start()
	c.settled()
	c.steps(3)
	c.check()
}

// Each lighthouse is replaced by a new process, the leader last, as in an upgrade.
func TestARollingRestartCostsNoStep(t *testing.T) {
	testmain.Slow(t)
	c := local(t)
	c.settled()
	since := c.attempts()
	leader, order := c.leader()
	for _, l := range append(slices.Clone(order), leader) {
		l.end(syscall.SIGTERM)
		c.steps(3)
		l.start()
		c.settled()
		c.steps(3)
	}
	c.noStepIsLost(since)
	c.check()
}

// Unauthenticated connections, and those with the token that are no lighthouse of this cluster, change
// nothing.
func TestStrangersOnThePortChangeNothing(t *testing.T) {
	testmain.Slow(t)
	for name, token := range map[string]string{"without a token": "", "with a token": "secret"} {
		t.Run(name, func(t *testing.T) {
			if token != "" {
				t.Setenv(auth.TokenFileEnv, fttest.File(t, token))
			}
			c := local(t)
			c.settled()
			leader, _ := c.leader()
			since, before := c.attempts(), c.status(leader)
			security := auth.SecurityFromEnv()
			for _, l := range c.all {
				for range 20 { // garbage instead of HTTP/2
					conn, err := net.Dial("tcp", strings.TrimPrefix(l.address, "http://"))
					require.NoError(t, err)
					_, _ = conn.Write(bytes.Repeat([]byte("garbage"), 1000))
					require.NoError(t, conn.Close())
				}
				for _, with := range []auth.Security{security, {}} {
					ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
					conn, err := rpc.DialLater(rpc.Dialing{Security: with}, "lighthouse", l.address)
					require.NoError(t, err)
					client := torchftpb.NewClusterServiceClient(conn)
					identity, err := client.Identify(ctx, &torchftpb.IdentifyRequest{})
					if with == security {
						require.NoError(t, err)
						assert.Equal(t, l.address, identity.GetSelf())
					} else {
						assert.Error(t, err)
					}
					for _, first := range []*torchftpb.Frame{
						{Data: bytes.Repeat([]byte("garbage"), 1000)},
						{Hello: &torchftpb.Hello{Cluster: "another", From: l.address, To: l.address}},
					} {
						link, err := client.Link(ctx)
						require.NoError(t, err)
						_ = link.Send(first) // fails if the lighthouse has ended the link
						_, err = link.Recv() // until the lighthouse ends the link
						require.Error(t, err)
						assert.NotEqual(t, codes.DeadlineExceeded, status.Code(err))
						if with == security && first.GetHello() != nil {
							assert.ErrorContains(t, err, "the cluster another")
						}
					}
					_ = conn.Close()
					cancel()
				}
			}
			c.steps(10)
			// The leader may change without them on a busy machine. In virtual time it does not:
			// TestStrangersOnTheLinksOfACluster.
			after := c.status(leader)
			for i, member := range after.Members {
				assert.Equal(t, before.Members[i].Address, member.Address)
				assert.True(t, member.Voter)
			}
			assert.Len(t, after.Members, 3)
			c.noStepIsLost(since)
			c.check()
		})
	}
}
