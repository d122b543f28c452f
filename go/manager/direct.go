package manager

import (
	"sync"

	"github.com/torchft/torchft/go/torchftpb"
)

// direct makes the calls of a rank in the server's process. For the server they come from a connection, which
// ends with Close.
type direct struct {
	service
	notices     <-chan *torchftpb.Notice
	unsubscribe func()
	closing     sync.Once
}

func (s *Server) direct() *direct {
	d := &direct{service: service{server: s, conn: &connection{}}}
	d.notices, d.unsubscribe = s.notices.Listen()
	return d
}

func (d *direct) Notices() <-chan *torchftpb.Notice { return d.notices }

func (d *direct) Report(report *torchftpb.RankRequest) { d.server.report(d.conn, report) }

// Close ends the pending calls, as the end of a connection does.
func (d *direct) Close() error {
	d.closing.Do(func() {
		d.unsubscribe()
		d.server.connectionEnded(d.conn)
	})
	return nil
}
