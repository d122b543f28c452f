package replica_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/replica"
	"github.com/torchft/torchft/go/torchftpb"
)

func TestParseCluster(t *testing.T) {
	good, err := replica.ParseCluster("http://c:1, http://a:1/,http://b:1")
	require.NoError(t, err)
	require.Equal(t, []string{"http://a:1", "http://b:1", "http://c:1"}, good)
	for list, want := range map[string]string{
		"":                      "--cluster is \"\"",
		"http://a:1":            "it has 1 addresses, but must have 3, 5 or 7",
		"http://a:1,http://b:1": "it has 2 addresses",
		"http://a:1,http://b:1,http://c:1,http://d:1":   "it has 4 addresses",
		"http://a:1,http://b:1,http://a:1":              "http://a:1 is in it twice",
		"http://a:1,http://b:1,http://a:1/":             "an address is in it twice",
		"http://a:1,http://b:1,c:1":                     "c:1",
		"http://a:1,https://b:1,http://c:1":             "all with https://",
		"http://a,http://b:1,http://c:1":                "the port is missing",
		strings.Repeat("http://a:1,", 8) + "http://b:1": "twice",
		"http://a:1,http://a:2,http://a:3,http://a:4,http://a:5,http://a:6,http://a:7,http://a:8,http://a:9": "it has 9 addresses",
	} {
		_, err := replica.ParseCluster(list)
		require.ErrorContains(t, err, want, list)
		require.ErrorContains(t, err, "--cluster", list)
	}
}

func TestSelf(t *testing.T) {
	list := []string{"http://a:1", "http://b:1", "http://b:2"}
	for _, c := range []struct{ advertise, bind, own, want, err string }{
		{"", "[::]:1", "a", "http://a:1", ""},
		{"", "0.0.0.0:2", "b", "http://b:2", ""},
		{"http://b:1/", ":7", "", "http://b:1", ""},
		{"", "[::]:1", "a b", "", "may be each of http://a:1, http://b:1: name one with --advertise"},
		{"", "[::]:3", "a b", "", "none of its addresses has the port 3 and a name of this host"},
		{"", "[::]:1", "x", "", "none of its addresses"},
		{"http://x:1", "[::]:1", "a", "", `--advertise is "http://x:1", which is not in --cluster`},
		{"", "nonsense", "a", "", `--bind is "nonsense"`},
	} {
		self, err := replica.Self(list, c.advertise, c.bind,
			func(host string) bool { return strings.Contains(c.own, host) })
		require.Equal(t, c.want, self)
		if c.err != "" {
			require.ErrorContains(t, err, c.err)
		}
	}
}

// files returns the content of a directory.
func files(t *testing.T, dir string) map[string]string {
	found := map[string]string{}
	require.NoError(t, filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		if err == nil && !info.IsDir() {
			text, err := os.ReadFile(path)
			found[path] = string(text)
			return err
		}
		return err
	}))
	return found
}

func TestADirectoryThatCannotBeUsedIsLeftAsItIs(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(t *testing.T, c *replica.Config)
		want   string
	}{
		{"another self", func(_ *testing.T, c *replica.Config) { c.Self = "http://b:1" },
			"it belongs to the lighthouse http://a:1, and this one is http://b:1"},
		{"another cluster", func(_ *testing.T, c *replica.Config) {
			c.Cluster = []string{"http://a:1", "http://x:1", "http://y:1"}
		}, "which belongs to the cluster of http://a:1,http://b:1,http://c:1"},
		{"a damaged identity", func(t *testing.T, c *replica.Config) {
			damage(t, c.Dir, func(b []byte) []byte {
				return []byte(strings.ReplaceAll(string(b), `"self":"http://a:1"`, `"self":"http://b:1"`))
			})
		}, "checksum is wrong"},
		{"snapshots without a log", func(t *testing.T, c *replica.Config) {
			require.NoError(t, os.Remove(filepath.Join(c.Dir, "raft.db")))
			require.NoError(t, os.CopyFS(filepath.Join(c.Dir, "snapshots"), os.DirFS(snapshots(t))))
		}, "it has a log or snapshots, but not the identity"},
		{"a file instead of a directory", func(t *testing.T, c *replica.Config) {
			c.Dir = filepath.Join(c.Dir, "raft.db")
		}, "not a directory"},
		{"a log of zeros", func(t *testing.T, c *replica.Config) {
			require.NoError(t, os.WriteFile(filepath.Join(c.Dir, "raft.db"), make([]byte, 65536), 0o600))
		}, "raft.db: invalid database"},
		{"a log of which only the first pages are left", func(t *testing.T, c *replica.Config) {
			damage(t, c.Dir, func(b []byte) []byte { return b[:2*os.Getpagesize()] })
		}, "damaged"},
		{"a log with damaged bytes", func(t *testing.T, c *replica.Config) {
			damage(t, c.Dir, func(b []byte) []byte {
				return []byte(strings.ReplaceAll(string(b), "secret state", "wicked state"))
			})
		}, "checksum is wrong"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := populate(t)
			cfg := replica.Config{Cluster: []string{"http://a:1", "http://b:1", "http://c:1"},
				Self: "http://a:1", Dir: dir, Dialing: rpc.Dialing{Network: newWorld(t).network.Host("a")}}
			c.change(t, &cfg)
			before := files(t, dir)
			_, err := replica.Open(t.Context(), cfg)
			require.ErrorContains(t, err, c.want)
			for path, text := range files(t, dir) {
				if !strings.HasSuffix(path, "raft.db") { // bbolt writes its own pages when it opens a file
					require.Equal(t, before[path], text, path)
				}
			}
		})
	}
}

// populate returns a directory of the lighthouse a of a cluster of three, with a log.
func populate(t *testing.T) string {
	dir := filepath.Join(t.TempDir(), "state")
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		w.hosts[0].bolt, w.hosts[0].dir = true, dir
		leader, term := w.started()
		for range 3 {
			require.NoError(t, leader.node.Propose(term, "job", []byte("secret state")))
		}
		w.agree("job", "secret state")
	})
	return dir
}

// snapshots returns a directory with a snapshot.
func snapshots(t *testing.T) string {
	dir := t.TempDir()
	s, err := replica.OpenStore(replica.Config{Logger: slog.New(slog.DiscardHandler)})(dir)
	require.NoError(t, err)
	_, via := raft.NewInmemTransport("a")
	sink, err := s.Create(1, 1, 1, raft.Configuration{}, 1, via)
	require.NoError(t, err)
	require.NoError(t, sink.Close())
	require.NoError(t, s.Close())
	return filepath.Join(dir, "snapshots")
}

func damage(t *testing.T, dir string, how func([]byte) []byte) {
	path := filepath.Join(dir, "raft.db")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, how(text), 0o600))
}

func TestDifferentListsAreNoCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		w.hosts[1].list = []string{"http://a:1", "http://b:1", "http://d:1"}
		for _, h := range w.hosts {
			h.start()
		}
		time.Sleep(10 * time.Second)
		for _, h := range w.hosts {
			s := h.node.Status()
			require.Contains(t, s.Trouble, "http://b:1,http://d:1", h.name)
			require.Contains(t, s.Trouble, "http://b:1,http://c:1", h.name)
			require.Empty(t, h.node.Identity().Cluster)
			require.Equal(t, 1, h.log.Count("takes no part in a cluster"), h.name)
		}
		w.hosts[1].close()
		w.hosts[1].list = w.list
		w.hosts[1].start()
		w.leads(nil)
		settle(t, "no trouble", func() bool { return w.hosts[1].node.Status().Trouble == "" })
	})
}

func TestTheDirectoryOfAnotherClusterWithTheSameAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		other := newWorld(t, "a", "b", "c")
		other.started()
		other.close()
		w := newWorld(t, "a", "b", "c")
		leader, term := w.started()
		require.NoError(t, leader.node.Propose(term, "job", []byte("1")))
		moved := w.hosts[(slicesIndex(w.hosts, leader)+1)%3]
		moved.close()
		from := other.hosts[slicesIndex(w.hosts, moved)]
		moved.dir, moved.memory = from.dir, from.memory
		identity, err := moved.memory.Get([]byte("TorchftIdentity"))
		require.NoError(t, err)
		moved.start()
		time.Sleep(10 * time.Second)
		require.Contains(t, moved.node.Status().Trouble,
			"most lighthouses of --cluster are in "+leader.node.Identity().Cluster)
		require.Contains(t, moved.log.String(), "one of them has the state directory of another cluster")
		require.Contains(t, leader.log.String(), "one of them has the state directory of another cluster")
		require.NoError(t, leader.node.Verify(t.Context(), term))
		require.Empty(t, leader.node.Status().Trouble)
		require.Empty(t, moved.node.States())
		moved.close()
		kept, err := moved.memory.Get([]byte("TorchftIdentity"))
		require.NoError(t, err)
		require.Equal(t, string(identity), string(kept))
	})
}

func TestTwoLighthousesWithOneAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		leader, term := w.started()
		second := w.add("x")
		second.list, second.address = w.list, "http://c:1"
		second.start()
		time.Sleep(10 * time.Second)
		require.Contains(t, second.node.Status().Trouble, "answers at the address of this one, http://c:1")
		require.Empty(t, second.node.Identity().Cluster)
		require.NoError(t, leader.node.Verify(t.Context(), term))
	})
}

// Unauthenticated connections on a Link get a refusal, or nothing, and the cluster goes on.
func TestStrangersOnALink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b", "c")
		leader, term := w.started()
		id := leader.node.Identity()
		name := id.Self + "#" + id.Instance
		conn, err := rpc.DialLater(rpc.Dialing{Network: w.network.Host("x")}, "lighthouse", leader.address)
		require.NoError(t, err)
		defer func() { _ = conn.Close() }()
		hello := func(cluster, from, to string) *torchftpb.Hello {
			return &torchftpb.Hello{Cluster: cluster, From: from, To: to}
		}
		for _, c := range []struct {
			hello *torchftpb.Hello
			data  string
			want  string
		}{
			{nil, "", "one of them has the state directory of another cluster"},
			{hello("other", "http://x:1#1", name), "", "one of them has the state directory of another cluster"},
			{hello(id.Cluster, "http://x:1#1", "http://b:9#1"), "", "each needs an address of its own"},
			{hello(id.Cluster, "http://x:1#1", id.Self+"#lost"), "", "has lost its state directory"},
			{hello(id.Cluster, "http://x:1#1", name), strings.Repeat("\xff\x00\xc1", 1000), "EOF"},
			{hello(id.Cluster, strings.Repeat("x", 3000), name), "\x00\xde\xff\xff", ""},
			{hello("other", strings.Repeat("x", 1<<20), name), "", "longer"},
			{hello(strings.Repeat("y", 1<<20), "http://x:1#1", name), "", "longer"},
		} {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			link, err := torchftpb.NewClusterServiceClient(conn).Link(ctx)
			require.NoError(t, err)
			require.NoError(t, link.Send(&torchftpb.Frame{Hello: c.hello}))
			_, err = link.Recv()
			if err == nil {
				require.NoError(t, link.Send(&torchftpb.Frame{Data: []byte(c.data)}))
				_, err = link.Recv()
			}
			require.ErrorContains(t, err, c.want)
			require.Less(t, len(err.Error()), 8000)
			cancel()
		}
		time.Sleep(5 * time.Second)
		require.NoError(t, leader.node.Verify(t.Context(), term))
		require.Equal(t, term, leader.node.Status().Term)
		require.Less(t, leader.log.Count("a connection between lighthouses was refused"), 5)
	})
}
