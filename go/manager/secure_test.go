package manager_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/manager"
)

// Two groups of two ranks with a token and certificates on both sides. Processes without one of these, or
// with a wrong one, are refused.
func TestAJobWithTokenAndCertificates(t *testing.T) {
	ca, otherCA := fttest.NewCA(t), fttest.NewCA(t)
	cert, key := ca.Issue("lighthouse", "a", "b", "far")
	all := auth.Security{TokenFile: fttest.File(t, "secret"), TLSCert: cert, TLSKey: key, TLSCA: ca.File,
		TLSClientCA: ca.File}
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2, func(cfg *lighthouse.Config) { cfg.Security = all })
		require.Equal(t, "https://lighthouse:29510", c.Lighthouse.Address())
		secure := func(security auth.Security) func(*manager.ServerConfig) {
			return func(cfg *manager.ServerConfig) {
				cfg.LighthouseAddr, cfg.Security, cfg.ConnectTimeout = c.Lighthouse.Address(), security,
					time.Second
			}
		}
		a, b := c.StartGroup("a", 2, secure(all)), c.StartGroup("b", 2, secure(all))
		require.Regexp(t, "^https://a:", a.Server.Address())
		for _, r := range round(t, 1, a, b) {
			assert.EqualValues(t, 2, r.ReplicaWorldSize)
		}

		wrong := all
		wrong.TokenFile = ""
		g := c.StartGroup("far", 1, secure(wrong))
		assert.ErrorContains(t, (<-g.Quorum(0, 1, time.Minute)).Err, "this server wants the job's token")
		g.Server.Shutdown()

		for wantError, change := range map[string]func(*auth.Security){
			"certificate required": func(s *auth.Security) {
				s.TLSCert, s.TLSKey, s.TLSClientCA = "", "",
					""
			},
			"tls: ": func(s *auth.Security) { s.TLSCert, s.TLSKey = otherCA.Issue("far") },
			"certificate signed by unknown authority": func(s *auth.Security) { s.TLSCA = otherCA.File },
			"expired": func(s *auth.Security) { s.TLSCert, s.TLSKey = ca.IssueExpired("far") },
		} {
			wrong := all
			change(&wrong)
			cfg := c.ServerConfig("far", 1)
			secure(wrong)(&cfg)
			_, err := fttest.NewManager(t.Context(), cfg)
			assert.ErrorContains(t, err, wantError)
			assert.ErrorContains(t, err,
				"could not connect to lighthouse at https://lighthouse:29510: timed out after 1s")
		}
		for _, r := range round(t, 2, a, b) {
			assert.EqualValues(t, 2, r.ReplicaWorldSize, "the job continues")
		}
	})
}
