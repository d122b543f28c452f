package manager_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/fttest"
)

// A panic of the machine ends the pending calls of the group, but neither the process nor the membership.
func TestAPanicOfTheMachineEndsTheWaitsOnly(t *testing.T) {
	for name, meet := range map[string]func(g *fttest.Group) error{
		"a quorum": func(g *fttest.Group) error { return (<-g.Quorum(1, 1, time.Minute)).Err },
		"a vote":   func(g *fttest.Group) error { return (<-g.Vote(1, 1, true, time.Minute)).Err },
		"the end of a connection": func(g *fttest.Group) error {
			g.Host(1).Cut()
			// the rank's client may notice the cut later than the server: a call made before that ends with
			// the connection
			synctest.Wait()
			return status.Error(codes.Internal, "")
		},
		"the end of a round": nil,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := fttest.NewCluster(t, 1)
				g := c.StartGroup("a", 2)
				round(t, 1, g)
				waits := g.Quorum(0, 2, time.Hour)
				synctest.Wait()
				if name == "the end of a round" {
					c.Net.Host("lighthouse").Freeze()
					other := g.Quorum(1, 2, time.Second)
					synctest.Wait()
					g.Server.BreakMachine()
					assert.Equal(t, codes.Internal, status.Code((<-other).Err))
				} else {
					g.Server.BreakMachine()
				}
				if meet != nil {
					assert.Equal(t, codes.Internal, status.Code(meet(g)))
				}
				got := <-waits
				assert.Equal(t, codes.Internal, status.Code(got.Err), "%v", got.Err)
				assert.ErrorContains(t, got.Err, "internal error in the manager server")
				if name != "the end of a round" {
					round(t, 2, g)
				}
			})
		})
	}
}
